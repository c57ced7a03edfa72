"""Unusual models: running statistics, integer buffers, frozen, tied and infinite values travel as what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.federated.small_task import Points, SmallTask
from torsh_distributed.errors import CompressionError, ConfigurationError, InvalidArgument
from torsh_distributed.federated import (
    CentralPrivacy,
    FederatedConfig,
    LocalPrivacy,
    PoissonSelection,
    TieredTask,
    simulate,
)
from torsh_distributed.federated.local_training import LocalWork, train_client
from torsh_distributed.federated.model_vector import ModelVector
from torsh_distributed.federated.random_seeds import drawing_as_of
from torsh_distributed.federated.strategies.registry import STRATEGIES, strategy_named
from torsh_distributed.federated.vector_codec import decoded

CLIENTS = 4


class Unusual(nn.Module):
    """Statistics that follow a count, a frozen layer, a mask with infinite values, a permutation, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.same = self.last
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.full((8,), -torch.inf).masked_fill(torch.arange(8) < 7, 0.0))
        self.register_buffer("order", torch.randperm(5))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.first(images[:, self.order]))
        return self.same(torch.softmax(self.frozen(hidden) + self.mask, dim=1))


class UnusualTask(SmallTask):
    def model(self) -> nn.Module:
        return Unusual()

    def partition(self, num_clients: int) -> Sequence[Points]:
        parts = super().partition(num_clients)  # of even sizes: statistics of one sample are none
        return [Points(one.images[: len(one) // 2 * 2], one.labels[: len(one) // 2 * 2]) for one in parts]

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"loss": float(cross_entropy(model(torch.ones(4, 5)), torch.zeros(4, dtype=torch.long)).detach())}


def config(**fields: object) -> FederatedConfig:
    return FederatedConfig(rounds=6, clients_per_round=CLIENTS, local_epochs=3, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*STRATEGIES, "int8", "topk:0.1"])
def test_every_strategy_and_codec_keeps_variances_and_what_is_frozen(name: str) -> None:
    fields = {"strategy": strategy_named(name)} if name in STRATEGIES else {"upload": name}
    if name == "int8":
        fields["download"] = name
    done = simulate(UnusualTask(), num_clients=CLIENTS, config=config(**fields))
    model = done.model
    assert isinstance(model, Unusual)
    assert float(model.norm.running_var.min()) > 0  # type: ignore[arg-type]
    assert torch.isfinite(torch.tensor([record.figures["loss"] for record in done.rounds])).all()
    before = simulate(UnusualTask(), num_clients=CLIENTS, config=FederatedConfig(rounds=0)).model.state_dict()
    for key in ("frozen.weight", "frozen.bias", "mask", "order"):
        torch.testing.assert_close(model.state_dict()[key], before[key], rtol=0, atol=0)
    assert not torch.equal(model.state_dict()["last.weight"], before["last.weight"])


def test_the_mean_is_that_of_plain_torch_with_statistics_of_each_client_from_the_first() -> None:
    with drawing_as_of(3):
        net = Unusual()
    task = UnusualTask()
    done = simulate(task, num_clients=CLIENTS, config=config(seed=1))
    start = simulate(task, num_clients=CLIENTS, config=FederatedConfig(rounds=0, seed=1)).model.state_dict()
    state, parts = {key: value.clone() for key, value in start.items()}, task.partition(CLIENTS)
    total = sum(map(len, parts))
    for _ in range(6):
        means = {key: torch.zeros_like(value) for key, value in state.items() if value.is_floating_point()}
        for part in parts:
            net.load_state_dict(state)
            net.train()
            task.train(net, part, 3)
            for key in means:
                means[key] += net.state_dict()[key] * (len(part) / total)
        state.update(means)
    found = done.model.state_dict()
    torch.testing.assert_close({key: found[key] for key in state}, state, rtol=1e-5, atol=1e-5)


class DrawnTask(UnusualTask):
    """Draws its data, and their order in training."""

    def partition(self, num_clients: int) -> Sequence[Points]:
        sizes = [8 + 2 * client for client in range(num_clients)]
        return [Points(torch.randn(size, 5), torch.randint(3, (size,))) for size in sizes]

    def train(self, model: nn.Module, data: Points, epochs: int) -> Mapping[str, float]:
        order = torch.randperm(len(data))
        return super().train(model, Points(data.images[order], data.labels[order]), epochs)


@pytest.mark.ranks
@pytest.mark.parametrize("is_tiered", [False, True])
def test_workers_give_the_model_of_one_process(is_tiered: bool) -> None:
    task = TieredTask(DrawnTask(), clients=2, period=2) if is_tiered else DrawnTask()
    found = [simulate(task, num_clients=3, config=config(), num_workers=workers) for workers in (1, 2)]
    states = [done.model.state_dict() for done in found]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=1e-6)


@pytest.mark.needs_dp_accounting
def test_noise_is_for_what_is_trained() -> None:
    class Frozen(SmallTask):
        def model(self) -> nn.Module:
            net = super().model()
            net.get_submodule("0").requires_grad_(False)
            return net

    before = simulate(Frozen(), num_clients=2, config=FederatedConfig(rounds=0)).model.state_dict()
    noise = {"clip_norm": 1.0, "noise_multiplier": 2.0, "delta": 1e-3}
    for fields in (
        {"privacy": LocalPrivacy(**noise)},
        {"privacy": CentralPrivacy(**noise), "selection": PoissonSelection(1.0)},
    ):
        after = simulate(Frozen(), num_clients=CLIENTS, config=config(**fields)).model.state_dict()
        assert torch.equal(after["0.weight"], before["0.weight"])
        assert not torch.equal(after["2.weight"], before["2.weight"])
        with pytest.raises(ConfigurationError, match="this model has running statistics"):
            simulate(UnusualTask(), num_clients=2, config=config(**fields))


def test_what_gets_no_noise_does_not_leave_a_client() -> None:
    task = UnusualTask()
    replica = ModelVector(task.model())
    work = LocalWork(round=0, client="c", epochs=1, seed=1, local_clip=1.0, local_noise_std=1.0)
    with pytest.raises(InvalidArgument, match="training changed buffers or frozen parameters"):
        train_client(task, replica, replica.read(), task.partition(2)[1], work, {})


def test_models_that_differ_in_what_does_not_travel_have_other_fingerprints() -> None:
    prints = []
    for seed in (1, 1, 2):
        with drawing_as_of(seed):
            prints.append(ModelVector(Unusual()).fingerprint)
    assert prints[0] == prints[1] != prints[2]
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert ModelVector(nn.Linear(2, 2)).fingerprint != ModelVector(frozen).fingerprint


def test_what_cannot_be_averaged_is_refused() -> None:
    class Complex(SmallTask):
        def model(self) -> nn.Module:
            return nn.Linear(5, 3, dtype=torch.complex64)

    with pytest.raises(InvalidArgument, match=r"complex values .* cannot be averaged"):
        simulate(Complex(), num_clients=2)

    class Thawed(UnusualTask):
        def train(self, model: nn.Module, data: Points, epochs: int) -> Mapping[str, float]:
            return super().train(model.requires_grad_(True), data, epochs)

    simulate(Thawed(), num_clients=2, config=FederatedConfig(rounds=1))
    with pytest.raises(Exception, match="changed parameters that model\\(\\) had frozen"):
        simulate(Thawed(), num_clients=2, config=FederatedConfig(rounds=1, upload="int8"))


def test_a_message_of_another_size_is_refused() -> None:
    like = torch.zeros(10)
    for message in (torch.ones(0, dtype=torch.uint8), torch.ones(5, dtype=torch.uint8), torch.ones(40)):
        with pytest.raises(CompressionError):
            decoded("int8", message, like, 0, 6, 8)


def test_random_numbers_go_on_as_before(tmp_path: Path) -> None:
    torch.manual_seed(4)
    expected = torch.rand(2)
    torch.manual_seed(4)
    with drawing_as_of(9):
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected)
