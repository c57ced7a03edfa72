"""Strategies that step along the mean update: FedAvg, FedProx, FedAvgM, FedMom."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from torsh_distributed.federated.strategies.base import FederatedStrategy, require_positive, require_share
from torsh_distributed.federated.update_sum import MeanUpdate


class FedAvg(FederatedStrategy):
    """x + server_lr * mean. With server_lr 1 the next model is the clients' mean, weighted by samples."""

    name = "fedavg"

    def __init__(self, *, server_lr: float = 1.0) -> None:
        require_positive(self.name, server_lr=server_lr)
        self.server_lr = server_lr

    @override
    def step(self, model: Tensor, mean: MeanUpdate, num_clients: int) -> Tensor:
        return model + self.server_lr * mean.delta


class FedProx(FedAvg):
    """FedAvg whose clients add mu/2 * |y - x|^2 to their loss, so those with odd data or little time stay near."""

    name = "fedprox"

    def __init__(self, *, mu: float = 0.01, server_lr: float = 1.0) -> None:
        super().__init__(server_lr=server_lr)
        require_positive(self.name, mu=mu)
        self.proximal = mu


class FedAvgM(FederatedStrategy):
    """v = momentum * v + mean; x + server_lr * v."""

    name = "fedavgm"

    def __init__(self, *, momentum: float = 0.9, server_lr: float = 1.0) -> None:
        require_positive(self.name, server_lr=server_lr)
        require_share(self.name, momentum=momentum)
        self.momentum = momentum
        self.server_lr = server_lr
        self._velocity: Tensor | None = None

    @override
    def step(self, model: Tensor, mean: MeanUpdate, num_clients: int) -> Tensor:
        before = self._velocity
        self._velocity = mean.delta.clone() if before is None else self.momentum * before + mean.delta
        return model + self.server_lr * self._velocity

    @override
    def state(self) -> dict[str, Any]:
        return {"velocity": self._velocity}

    @override
    def load(self, state: dict[str, Any]) -> None:
        self._velocity = state["velocity"]


class FedMom(FederatedStrategy):
    """Nesterov's form: z' = x + server_lr * mean, and x goes on beyond it, to z' + momentum * (z' - z)."""

    name = "fedmom"

    def __init__(self, *, momentum: float = 0.9, server_lr: float = 1.0) -> None:
        require_positive(self.name, server_lr=server_lr)
        require_share(self.name, momentum=momentum)
        self.momentum = momentum
        self.server_lr = server_lr
        self._reached: Tensor | None = None

    @override
    def step(self, model: Tensor, mean: MeanUpdate, num_clients: int) -> Tensor:
        before = model if self._reached is None else self._reached
        self._reached = model + self.server_lr * mean.delta
        return self._reached + self.momentum * (self._reached - before)

    @override
    def state(self) -> dict[str, Any]:
        return {"reached": self._reached}

    @override
    def load(self, state: dict[str, Any]) -> None:
        self._reached = state["reached"]
