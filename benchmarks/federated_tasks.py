"""Tasks of the case federated, in a module that processes of clients can import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from benchmarks import federated_digits as digits
from torsh_distributed.federated import FederatedTask


class Rounds(FederatedTask):
    """The digits of `federated_digits`."""

    @override
    def model(self) -> nn.Module:
        return digits.model()

    @override
    def partition(self, num_clients: int) -> Sequence[digits.Part]:
        return digits.parts()

    @override
    def num_samples(self, data: digits.Part) -> int:
        return len(data.labels)

    @override
    def train(self, model: nn.Module, data: digits.Part, epochs: int) -> None:
        digits.train(model, data)


class EmptyRounds(Rounds):
    """Clients send back the model that they got."""

    @override
    def device_data(self, device: str) -> digits.Part:
        return digits.Part(torch.zeros(1, 64), torch.zeros(1, dtype=torch.long))

    @override
    def train(self, model: nn.Module, data: Any, epochs: int) -> Mapping[str, float]:
        return {}
