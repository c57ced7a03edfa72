"""Every strategy has the weights of a plain torch loop that is written from its paper, in every round."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.federated.small_task import Points, SmallTask, batches
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.federated import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FederatedConfig,
    FederatedStrategy,
    FedMom,
    FedNova,
    FedProx,
    FedYogi,
    Scaffold,
    simulate,
)
from torsh_distributed.federated.random_seeds import derived_seed, seed_everything
from torsh_distributed.federated.strategies.registry import STRATEGIES, strategy_named

CLIENTS, ROUNDS, EPOCHS, RATE = 5, 4, 2, 0.1


def first_model(task: SmallTask) -> nn.Module:
    seed_everything(derived_seed(0, "model"))
    return task.model()


def values_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def locally_trained(model: nn.Module, start: Tensor, data: Points, *, mu: float = 0.0, momentum: float = 0.0) -> Tensor:
    """Plain torch; the proximal term is in the loss."""
    model = copy.deepcopy(model)
    nn.utils.vector_to_parameters(start.clone(), model.parameters())  # it shares the vector's memory
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    for _ in range(EPOCHS):
        for images, labels in batches(data):
            optimizer.zero_grad()
            now = nn.utils.parameters_to_vector(model.parameters())
            loss = cross_entropy(model(images), labels) + mu / 2 * (now - start).square().sum()
            loss.backward()
            optimizer.step()
    return values_of(model)


class PlainRounds:
    """x, and the mean update of a round, weighted by samples."""

    def __init__(self, *, mu: float = 0.0, momentum: float = 0.0) -> None:
        task = SmallTask()
        self.net = first_model(task)
        self.x = values_of(self.net)
        self.parts = task.partition(CLIENTS)
        self.mu, self.momentum = mu, momentum

    def deltas(self) -> list[Tensor]:
        return [
            locally_trained(self.net, self.x, part, mu=self.mu, momentum=self.momentum) - self.x for part in self.parts
        ]

    @property
    def shares(self) -> list[float]:
        total = sum(map(len, self.parts))
        return [len(part) / total for part in self.parts]

    @property
    def num_steps(self) -> list[int]:
        return [EPOCHS * len(batches(part)) for part in self.parts]

    def mean(self) -> Tensor:
        return sum((p * delta for p, delta in zip(self.shares, self.deltas(), strict=True)), torch.zeros_like(self.x))


def plain_fedavg(rate: float, mu: float = 0.0) -> list[Tensor]:
    plain = PlainRounds(mu=mu)
    found = []
    for _ in range(ROUNDS):
        plain.x = plain.x + rate * plain.mean()
        found.append(plain.x)
    return found


def plain_fedavgm() -> list[Tensor]:
    plain, found = PlainRounds(), []
    velocity = torch.zeros_like(plain.x)
    for _ in range(ROUNDS):
        velocity = 0.8 * velocity + plain.mean()
        plain.x = plain.x + 0.5 * velocity
        found.append(plain.x)
    return found


def plain_fedmom() -> list[Tensor]:
    plain, found = PlainRounds(), []
    z = plain.x
    for _ in range(ROUNDS):
        next_z = plain.x + plain.mean()
        plain.x, z = next_z + 0.7 * (next_z - z), next_z
        found.append(plain.x)
    return found


def plain_adaptive(second_of: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    plain, found = PlainRounds(), []
    m, v = torch.zeros_like(plain.x), torch.full_like(plain.x, 1e-6)
    for _ in range(ROUNDS):
        delta = plain.mean()
        m = 0.9 * m + 0.1 * delta
        v = second_of(v, delta**2)
        plain.x = plain.x + 0.1 * m / (v.sqrt() + 1e-3)
        found.append(plain.x)
    return found


def plain_fednova(a_of: Callable[[int], float], *, mu: float = 0.0, momentum: float = 0.0) -> list[Tensor]:
    plain, found = PlainRounds(mu=mu, momentum=momentum), []
    for _ in range(ROUNDS):
        a = [a_of(steps) for steps in plain.num_steps]
        normalised = sum(
            (p * delta / a_i for p, delta, a_i in zip(plain.shares, plain.deltas(), a, strict=True)),
            torch.zeros_like(plain.x),
        )
        plain.x = plain.x + sum(p * a_i for p, a_i in zip(plain.shares, a, strict=True)) * normalised
        found.append(plain.x)
    return found


def plain_scaffold() -> list[Tensor]:
    """Steps written out, without an optimizer."""
    plain, found = PlainRounds(), []
    c = torch.zeros_like(plain.x)
    own = [torch.zeros_like(c) for _ in range(CLIENTS)]
    for _ in range(ROUNDS):
        changes, deltas = [], []
        for index, part in enumerate(plain.parts):
            y = plain.x.clone()
            for _ in range(EPOCHS):
                for images, labels in batches(part):
                    nn.utils.vector_to_parameters(y, plain.net.parameters())
                    plain.net.zero_grad()
                    cross_entropy(plain.net(images), labels).backward()
                    g = torch.cat([param.grad.flatten() for param in plain.net.parameters()])
                    y = y - RATE * (g - own[index] + c)
            new = own[index] - c + (plain.x - y) / (plain.num_steps[index] * RATE)
            changes.append(new - own[index])
            deltas.append(y - plain.x)
            own[index] = new
        plain.x = plain.x + torch.stack(deltas).mean(dim=0)
        c = c + torch.stack(changes).mean(dim=0)  # all clients take part
        found.append(plain.x)
    return found


def momentum_norm(steps: int) -> float:
    rho = 0.6
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)


def proximal_norm(steps: int) -> float:
    mu = 0.5
    return (1 - (1 - RATE * mu) ** steps) / (RATE * mu)


CASES: dict[str, tuple[FederatedStrategy, float, Callable[[], list[Tensor]]]] = {
    "fedavg": (FedAvg(), 0.0, lambda: plain_fedavg(1.0)),
    "fedavg, half a step": (FedAvg(server_lr=0.5), 0.0, lambda: plain_fedavg(0.5)),
    "fedprox": (FedProx(mu=0.5), 0.0, lambda: plain_fedavg(1.0, mu=0.5)),
    "fedavgm": (FedAvgM(momentum=0.8, server_lr=0.5), 0.0, plain_fedavgm),
    "fedmom": (FedMom(momentum=0.7), 0.0, plain_fedmom),
    "fedadam": (FedAdam(), 0.0, lambda: plain_adaptive(lambda v, square: 0.99 * v + 0.01 * square)),
    "fedyogi": (
        FedYogi(),
        0.0,
        lambda: plain_adaptive(lambda v, square: v - 0.01 * square * torch.sign(v - square)),
    ),
    "fedadagrad": (FedAdagrad(), 0.0, lambda: plain_adaptive(lambda v, square: v + square)),
    "fednova": (FedNova(), 0.0, lambda: plain_fednova(float)),
    "fednova, momentum": (FedNova(), 0.6, lambda: plain_fednova(momentum_norm, momentum=0.6)),
    "fednova, proximal": (FedNova(mu=0.5), 0.0, lambda: plain_fednova(proximal_norm, mu=0.5)),
    "scaffold": (Scaffold(), 0.0, plain_scaffold),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_a_plain_loop_in_every_round(case: str) -> None:
    strategy, momentum, plain = CASES[case]
    task = SmallTask(rate=RATE, momentum=momentum)
    config = FederatedConfig(rounds=ROUNDS, clients_per_round=CLIENTS, local_epochs=EPOCHS, strategy=strategy)
    simulate(task, num_clients=CLIENTS, config=config)
    assert len(task.seen) == ROUNDS
    for ours, theirs in zip(task.seen, plain(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_every_strategy_has_a_plain_loop_here() -> None:
    assert {strategy.name for strategy, _, _ in CASES.values()} == set(STRATEGIES)


def test_one_config_serves_two_runs() -> None:
    """The server's momentum is the run's, not the config's."""
    config = FederatedConfig(rounds=2, clients_per_round=3, strategy=FedAvgM())
    first, second = SmallTask(), SmallTask()
    simulate(first, num_clients=3, config=config)
    simulate(second, num_clients=3, config=config)
    torch.testing.assert_close(first.seen, second.seen, rtol=0, atol=0)


class AdamTask(SmallTask):
    def train(self, model: nn.Module, data: Points, epochs: int) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        cross_entropy(model(batches(data)[0][0]), batches(data)[0][1]).backward()
        optimizer.step()


class ByHandTask(SmallTask):
    def train(self, model: nn.Module, data: Points, epochs: int) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)


class ClosureTask(SmallTask):
    def train(self, model: nn.Module, data: Points, epochs: int) -> None:
        images, labels = batches(data)[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> float:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            return loss.item()

        optimizer.step(closure)


class PartsTask(SmallTask):
    """An optimizer for each layer."""

    def train(self, model: nn.Module, data: Points, epochs: int) -> None:
        optimizers = [torch.optim.SGD(model.get_submodule(name).parameters(), lr=0.1) for name in ("0", "2")]
        cross_entropy(model(batches(data)[0][0]), batches(data)[0][1]).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    ("task", "strategy", "kind", "message"),
    [
        (PartsTask(), FedNova(), ConfigurationError, "each of several optimizers has a part"),
        (PartsTask(), Scaffold(), ConfigurationError, "each of several optimizers has a part"),
        (AdamTask(), FedNova(), ConfigurationError, "FedNova is defined for SGD"),
        (AdamTask(), Scaffold(), ConfigurationError, "SCAFFOLD is defined for plain SGD"),
        (SmallTask(momentum=0.9), Scaffold(), ConfigurationError, "plain SGD"),
        (ClosureTask(), FedProx(), ConfigurationError, "a closure computes gradients"),
        (ByHandTask(), FedProx(), ConnectionError, "took no step of an optimizer"),
    ],
)
def test_training_that_a_strategy_cannot_reach_is_refused(
    task: SmallTask, strategy: FederatedStrategy, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        simulate(task, num_clients=2, config=FederatedConfig(rounds=1, strategy=strategy))


def test_plain_averaging_takes_any_training() -> None:
    for task in (AdamTask(), ByHandTask(), ClosureTask()):
        simulate(task, num_clients=2, config=FederatedConfig(rounds=1))
        assert task.seen[0].isfinite().all()


def test_an_unknown_strategy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidArgument, match="did you mean fedadam"):
        strategy_named("fedadm")


@pytest.mark.parametrize("wrong", [{"server_lr": 0.0}, {"tau": -1.0}, {"beta1": 1.0}])
def test_odd_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        FedAdam(**wrong)
