"""The interface of DeepSpeed's learning rate schedules: an index of the last batch, and a rate for each group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torsh_distributed.errors import InvalidArgument

NOT_STARTED = -1
"""`last_batch_iteration` before the first step."""


class BatchSchedule(ABC):
    """Sets the learning rates of an optimizer after every batch; the state is the index of that batch alone.

    torch's schedulers count calls and keep the rates they began with; these compute every rate from the index, which
    `step` may also be given. A wrapper that holds the optimizer as `.optimizer` is accepted too.
    """

    optimizer: Optimizer
    last_batch_iteration: int

    def __init__(self, optimizer: Any, last_batch_iteration: int = NOT_STARTED) -> None:
        self.optimizer = _torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    @abstractmethod
    def get_lr(self) -> list[Any]:
        """The rate of each group for `last_batch_iteration`. Tensors where the optimizer's rates are."""

    def get_last_lr(self) -> list[Any]:
        """The rates as the last step set them."""
        return self._last_lr

    def step(self, batch_iteration: int | None = None) -> None:
        """Set the rates for the next batch, or for the batch of that index."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if batch_iteration is None else batch_iteration
        self.set_rates(self.get_lr())

    def set_rates(self, rates: Sequence[Any]) -> None:
        """Put one rate into each group; a rate that is a tensor is filled in place, as compiled optimizers need it."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """The index of the last batch, as DeepSpeed stores it."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after that batch; the rates follow with the next step."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def per_group(self, value: Any, name: str) -> list[Any]:
        """`value` for every group, or the list of one value per group that it is."""
        num_groups = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [value] * num_groups
        if len(value) != num_groups:
            raise InvalidArgument(
                f"{name} has {len(value)} values, but the optimizer has {num_groups} groups",
                hint=f"give one number, or one for each group: {name} is in scheduler.params",
            )
        return list(value)


def positive_steps(value: Any, name: str) -> int:
    """`value` if it is a positive whole number; raises InvalidArgument, a ValueError, else."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InvalidArgument(f"{name} must be a positive integer", hint="it counts steps", **{name: value})
    return value


def _torch_optimizer(optimizer: Any) -> Optimizer:
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, Optimizer):
            return candidate
    raise InvalidArgument(
        "a schedule needs a torch optimizer, or an object that holds one as .optimizer", got=type(optimizer).__name__
    )
