"""Training with hostile clients, for tests and benchmarks: digits on 20 clients, the first f of which attack.

Attackers know all honest updates of the round. What they send takes the place of their own just before the rule, but
for values that are not finite, which take the way of every update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.federated import FederatedConfig, FederatedTask, dirichlet_parts, iid_parts, simulate
from torsh_distributed.federated.robust.base import RobustRule

NUM_CLIENTS = 20
NUM_TEST = 360
Attack = Callable[[Tensor, int], Tensor]


def sign_flip(honest: Tensor, f: int) -> Tensor:
    """Ten times the honest mean, the other way."""
    return (-10 * honest.mean(dim=0)).expand(f, -1)


def little_is_enough(honest: Tensor, f: int) -> Tensor:
    """ALIE: as far from the honest mean as still looks like one of them."""
    s = NUM_CLIENTS // 2 + 1 - f
    z = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor((NUM_CLIENTS - f - s) / (NUM_CLIENTS - f)))
    return (honest.mean(dim=0) - z * honest.std(dim=0)).expand(f, -1)


def inner_product(honest: Tensor, f: int) -> Tensor:
    """IPM: half the honest mean, the other way."""
    return (-0.5 * honest.mean(dim=0)).expand(f, -1)


ATTACKS: dict[str, Attack] = {attack.__name__: attack for attack in (sign_flip, little_is_enough, inner_product)}
NOT_FINITE = "not_finite"


class AttackedRule(RobustRule):
    """The rule, over updates of which the first f have been replaced."""

    name = "attacked"

    def __init__(self, rule: RobustRule, attack: Attack) -> None:
        super().__init__(hostile=rule.hostile)
        self._rule, self._attack = rule, attack

    @property
    @override
    def fewest(self) -> int:
        return self._rule.fewest

    @override
    def _combine(self, updates: Tensor) -> Tensor:
        honest = updates[self.hostile :]
        return self._rule.combine(torch.cat([self._attack(honest, self.hostile), honest]))


class Part(NamedTuple):
    """Of one client."""

    images: Tensor
    labels: Tensor
    is_hostile: bool


class HostileDigits(FederatedTask):
    """64 pixels to ten digits."""

    def __init__(self, *, alpha: float | None, seed: int, num_not_finite: int = 0) -> None:
        """`alpha`: of the Dirichlet distribution of labels over clients; None: all have the same."""
        from sklearn.datasets import load_digits  # takes two seconds, which only these tests should pay

        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
        self.images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
        self.labels = torch.tensor(digits.target)[order]
        self.alpha, self.seed, self.num_not_finite = alpha, seed, num_not_finite

    @override
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    @override
    def partition(self, num_clients: int) -> Sequence[Part]:
        images, labels = self.images[NUM_TEST:], self.labels[NUM_TEST:]
        if self.alpha is None:
            parts = iid_parts(len(labels), num_clients, seed=self.seed)
        else:
            parts = dirichlet_parts(labels.tolist(), num_clients, alpha=self.alpha, seed=self.seed)
        return [
            Part(images[part or [0]], labels[part or [0]], client < self.num_not_finite)
            for client, part in enumerate(map(list, parts))
        ]

    @override
    def num_samples(self, data: Part) -> int:
        return len(data.labels)

    @override
    def train(self, model: nn.Module, data: Part, epochs: int) -> Mapping[str, float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for _ in range(epochs):
            for places in torch.randperm(len(data.labels)).split(16):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(data.images[places]), data.labels[places]).backward()
                optimizer.step()
        if data.is_hostile:
            nn.init.constant_(next(model.parameters()), float("nan"))
        return {}

    @override
    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        found = model(self.images[:NUM_TEST]).argmax(dim=1)
        return {"accuracy": (found == self.labels[:NUM_TEST]).float().mean().item()}


def accuracy(rule: RobustRule | None, attack: str | None, *, alpha: float | None, seed: int, rounds: int) -> float:
    """Of the global model after training with the rule (None: the mean), with or without an attack."""
    task = HostileDigits(
        alpha=alpha, seed=seed, num_not_finite=rule.hostile if rule is not None and attack == NOT_FINITE else 0
    )
    if rule is not None and attack in ATTACKS:
        rule = AttackedRule(copy.copy(rule), ATTACKS[attack])
    config = FederatedConfig(
        rounds=rounds,
        clients_per_round=NUM_CLIENTS,
        min_clients=1 if rule is None else rule.fewest,
        local_epochs=1,
        rule=rule,
        seed=seed,
    )
    return simulate(task, num_clients=NUM_CLIENTS, config=config).rounds[-1].figures["accuracy"]
