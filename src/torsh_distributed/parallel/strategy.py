"""What the Engine asks of a way to split training over ranks: a short interface, one class per way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from torsh_distributed.errors import InvalidArgument


class Strategy(ABC):
    """A model spread over the world: what to call, who gets which data, how gradients and numbers come together."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The module to call in forward: the user's model, wrapped."""

    @property
    @abstractmethod
    def data_rank(self) -> int:
        """Which part of every batch this rank works on."""

    @property
    @abstractmethod
    def data_degree(self) -> int:
        """Into how many parts a batch is cut."""

    @abstractmethod
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one microbatch: only the last of a step brings gradients together."""

    @abstractmethod
    def mean_loss(self, loss: Tensor) -> PendingMean:
        """Start averaging a scalar over the parts of the batch; every rank calls this at the same point of a step."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`; returns it as it was."""

    @abstractmethod
    def take_comm_s(self) -> float | None:
        """Seconds during which gradients were on their way since the last call; None where that is not measured."""


class PendingMean(ABC):
    """A mean on its way: it travels while backward computes."""

    @abstractmethod
    def wait(self) -> float:
        """The mean, once it has arrived."""


def check_one_device(model: nn.Module) -> torch.device:
    """The device of all parameters and buffers, or InvalidArgument naming one on each of two devices."""
    seen: dict[torch.device, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        seen.setdefault(tensor.device, name)
    if len(seen) > 1:
        (one, first), (two, second), *_ = seen.items()
        raise InvalidArgument(
            f"the model lies on two devices: {first} on {one}, {second} on {two}",
            hint="move the whole model to one device before parallelize()",
        )
    return next(iter(seen), torch.device("cpu"))
