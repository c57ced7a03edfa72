"""Strategies whose server takes adaptive steps along the mean update: FedAdagrad, FedAdam, FedYogi.

As published (Reddi et al., 2021): no bias correction, and the second moment begins at tau squared.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.federated.strategies.base import FederatedStrategy, require_positive, require_share
from torsh_distributed.federated.update_sum import MeanUpdate


class AdaptiveServer(FederatedStrategy):
    """m = beta1 * m + (1 - beta1) * mean; x + server_lr * m / (sqrt(v) + tau), where v is the member's own."""

    def __init__(self, *, server_lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> None:
        require_positive(self.name, server_lr=server_lr, tau=tau)
        require_share(self.name, beta1=beta1, beta2=beta2)
        self.server_lr = server_lr
        self.beta1, self.beta2 = beta1, beta2
        self.tau = tau
        self._first: Tensor | None = None
        self._second: Tensor | None = None

    @override
    def step(self, model: Tensor, mean: MeanUpdate, num_clients: int) -> Tensor:
        first = torch.zeros_like(model) if self._first is None else self._first
        second = torch.full_like(model, self.tau**2) if self._second is None else self._second
        self._first = self.beta1 * first + (1 - self.beta1) * mean.delta
        self._second = self._next_second(second, mean.delta.square())
        return model + self.server_lr * self._first / (self._second.sqrt() + self.tau)

    @abstractmethod
    def _next_second(self, second: Tensor, square: Tensor) -> Tensor:
        """The second moment after an update whose square is given."""

    @override
    def state(self) -> dict[str, Any]:
        return {"first": self._first, "second": self._second}

    @override
    def load(self, state: dict[str, Any]) -> None:
        self._first, self._second = state["first"], state["second"]


class FedAdam(AdaptiveServer):
    """v = beta2 * v + (1 - beta2) * mean^2."""

    name = "fedadam"

    @override
    def _next_second(self, second: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * second + (1 - self.beta2) * square


class FedYogi(AdaptiveServer):
    """v = v - (1 - beta2) * mean^2 * sign(v - mean^2): grows and shrinks by small amounts."""

    name = "fedyogi"

    @override
    def _next_second(self, second: Tensor, square: Tensor) -> Tensor:
        return second - (1 - self.beta2) * square * torch.sign(second - square)


class FedAdagrad(AdaptiveServer):
    """v = v + mean^2."""

    name = "fedadagrad"

    @override
    def _next_second(self, second: Tensor, square: Tensor) -> Tensor:
        return second + square
