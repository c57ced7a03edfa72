"""FedProx's synthetic(1, 1), for tests and benchmarks: 30 clients whose data and models differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.federated import Availability, FedAvg, FederatedConfig, FederatedTask, FedProx, simulate

NUM_CLIENTS, PER_ROUND, EPOCHS, BATCH, RATE, MU = 30, 10, 20, 10, 0.01, 1.0
_DIMS, _CLASSES, _MOST_SAMPLES = 60, 10, 800
_TEST_SHARE = 0.2


class Part(NamedTuple):
    """Of one client."""

    points: Tensor
    labels: Tensor


class SyntheticPoints(FederatedTask):
    """Points around a centre of each client, labelled by a linear model of its own; each client has means of both."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        spread = np.diag(np.arange(1, _DIMS + 1) ** -1.2)
        sizes = np.minimum(generator.lognormal(4, 2, NUM_CLIENTS).astype(int) + 50, _MOST_SAMPLES)
        self.training: list[Part] = []
        tests: list[Part] = []
        for size in sizes:
            model_mean, centre_mean = generator.normal(0, 1, 2)
            weight = generator.normal(model_mean, 1, (_CLASSES, _DIMS))
            bias = generator.normal(model_mean, 1, _CLASSES)
            points = generator.multivariate_normal(generator.normal(centre_mean, 1, _DIMS), spread, size)
            labels = (points @ weight.T + bias).argmax(axis=1)
            part = Part(torch.tensor(points, dtype=torch.float32), torch.tensor(labels))
            num_test = int(_TEST_SHARE * size)
            tests.append(Part(*(column[:num_test] for column in part)))
            self.training.append(Part(*(column[num_test:] for column in part)))
        self.test = Part(*(torch.cat(columns) for columns in zip(*tests, strict=True)))

    @override
    def model(self) -> nn.Module:
        return nn.Linear(_DIMS, _CLASSES)

    @override
    def partition(self, num_clients: int) -> Sequence[Part]:
        return self.training

    @override
    def num_samples(self, data: Part) -> int:
        return len(data.labels)

    @override
    def train(self, model: nn.Module, data: Part, epochs: int) -> Mapping[str, float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(epochs):
            for places in torch.randperm(len(data.labels)).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(data.points[places]), data.labels[places]).backward()
                optimizer.step()
        return {}

    @override
    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        found = model(self.test.points).argmax(dim=1)
        return {"accuracy": (found == self.test.labels).float().mean().item()}


def accuracies(*, seed: int, rounds: int, stragglers: float) -> tuple[float, float]:
    """Of FedAvg, which drops clients that did not do all epochs, and of FedProx, which takes what they did."""
    availability = Availability(stragglers=stragglers)
    found = []
    for strategy in (FedAvg(), FedProx(mu=MU)):
        config = FederatedConfig(
            rounds=rounds,
            clients_per_round=PER_ROUND,
            local_epochs=EPOCHS,
            max_attempts=1000,
            partial_work=isinstance(strategy, FedProx),
            strategy=strategy,
            seed=seed,
        )
        result = simulate(SyntheticPoints(seed), num_clients=NUM_CLIENTS, config=config, availability=availability)
        found.append(result.rounds[-1].figures["accuracy"])
    return found[0], found[1]
