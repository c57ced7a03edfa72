"""Strategies for clients that do different amounts of work or have different data: FedNova, SCAFFOLD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.federated.local_training import CONTROL, ClientUpdate
from torsh_distributed.federated.strategies.base import FederatedStrategy, require_positive
from torsh_distributed.federated.update_sum import MeanUpdate


class FedNova(FederatedStrategy):
    """x + mean(a_i) * mean(delta_i / a_i), where a_i is how far the steps of client i go.

    Why: in a plain mean, who takes more steps pulls the model towards its own data. With equal steps it is FedAvg.
    Momentum, Nesterov's and the proximal term are part of a_i.
    """

    name = "fednova"
    needs_step_norm = True
    takes_any_mean = False

    def __init__(self, *, mu: float = 0.0, server_lr: float = 1.0) -> None:
        require_positive(self.name, server_lr=server_lr)
        self.proximal = mu
        self.server_lr = server_lr

    @override
    def vector(self, update: ClientUpdate) -> Tensor:
        return update.delta / update.step_norm

    @override
    def step(self, model: Tensor, mean: MeanUpdate, num_clients: int) -> Tensor:
        return model + self.server_lr * mean.step_norm * mean.delta


class Scaffold(FederatedStrategy):
    """Clients correct each step by c - c_i; x + server_lr * mean; c + |S|/N * mean(c_i' - c_i).

    Why: c_i is the direction that a client's own data pull in, so its steps go where all clients' data pull. Clients
    count equally, as in the paper. Twice the traffic of FedAvg; c_i stays on its client.
    """

    name = "scaffold"
    takes_any_mean = False

    def __init__(self, *, server_lr: float = 1.0) -> None:
        require_positive(self.name, server_lr=server_lr)
        self.server_lr = server_lr
        self._control: Tensor | None = None

    @override
    def control(self, model: Tensor) -> Tensor:
        if self._control is None:
            self._control = torch.zeros_like(model)
        return self._control

    @override
    def weight(self, update: ClientUpdate) -> float:
        return 1.0

    @override
    def step(self, model: Tensor, mean: MeanUpdate, num_clients: int) -> Tensor:
        self._control = self.control(model) + mean.num_updates / num_clients * mean.extras[CONTROL]
        return model + self.server_lr * mean.delta

    @override
    def state(self) -> dict[str, Any]:
        return {CONTROL: self._control}

    @override
    def load(self, state: dict[str, Any]) -> None:
        self._control = state[CONTROL]
