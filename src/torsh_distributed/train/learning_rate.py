"""The learning rate over a run: scaled to the number of replicas, warmed up, then set by the user's scheduler."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import TrainingConfig
from torsh_distributed.train.binding import plain_value

LrScaling = Literal["none", "linear", "square_root", "adaptive"]
SchedulerFn = Callable[[Optimizer], LRScheduler]

_ADAPTIVE_BATCH = 32
"""The batch size at which `adaptive` leaves the learning rate unchanged."""


def lr_factor(scaling: LrScaling, *, data_degree: int, batch_size: int) -> float:
    """The factor of the learning rate: grows with the replicas (linear, square_root) or the batch (adaptive)."""
    if scaling == "linear":
        return float(data_degree)
    if scaling == "square_root":
        return math.sqrt(data_degree)
    if scaling == "adaptive":
        return math.sqrt(batch_size / _ADAPTIVE_BATCH)
    return 1.0


def scale_learning_rate(base_lr: float, scaling: LrScaling, *, data_degree: int, batch_size: int = 32) -> float:
    """`base_lr`, tuned for one replica, for `data_degree` replicas that share batches of `batch_size` samples."""
    return base_lr * lr_factor(scaling, data_degree=data_degree, batch_size=batch_size)


def warmup_factor(step: int, *, warmup_steps: int) -> float:
    """The share of the learning rate at update number `step`, counted from 0: rises linearly to 1."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


class LearningRate:
    """Holds the optimizer's learning rates: scaled once, ramped during warm-up, stepped by the user's scheduler.

    Rates are scaled before the scheduler is built, so it starts from scaled rates. Warm-up applies only around an
    update: a scheduler that computes the next rate from the current one sees the full rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        training: TrainingConfig,
        *,
        data_degree: int,
        scheduler_fn: SchedulerFn | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._training = training
        self._factor = 1.0
        self._scheduler: LRScheduler | None = None
        self.rescale(data_degree)
        if scheduler_fn is not None:
            self._scheduler = _made(scheduler_fn, optimizer)

    @property
    def current(self) -> float:
        """The rate of the first group, without warm-up."""
        return float(self._optimizer.param_groups[0]["lr"])

    @contextmanager
    def updating(self, step: int) -> Iterator[float]:
        """Around update number `step`, counted from 0: warm-up applied; yields the rate of the first group."""
        ramp = warmup_factor(step, warmup_steps=self._training.warmup_steps)
        if ramp == 1.0:
            yield self.current
            return
        full = [_value(group["lr"]) for group in self._optimizer.param_groups]
        self._set(rate * ramp for rate in full)
        try:
            yield self.current
        finally:
            self._set(full)

    def advance(self) -> None:
        """Step the user's scheduler after an update."""
        if self._scheduler is not None:
            self._scheduler.step()

    def rescale(self, data_degree: int) -> None:
        """Rescale the rates for another number of replicas, as after the world has changed."""
        training = self._training
        factor = lr_factor(training.lr_scaling, data_degree=data_degree, batch_size=training.batch_size)
        change, self._factor = factor / self._factor, factor
        self.multiply(change)

    def multiply(self, change: float) -> None:
        """Make every rate `change` times as large, those that the scheduler starts from too."""
        if change == 1.0:
            return
        for group in self._optimizer.param_groups:
            if "initial_lr" in group:
                group["initial_lr"] = group["initial_lr"] * change
        self._set(_value(group["lr"]) * change for group in self._optimizer.param_groups)
        if self._scheduler is not None and hasattr(self._scheduler, "base_lrs"):
            self._scheduler.base_lrs = [rate * change for rate in self._scheduler.base_lrs]

    def describe_scheduler(self) -> dict[str, Any] | None:
        """The scheduler's class and where it stands, to compare between ranks; None without one."""
        if self._scheduler is None:
            return None
        state = plain_value(self._scheduler.state_dict())
        return {"class": type(self._scheduler).__qualname__, **state}

    def state_dict(self) -> dict[str, Any]:
        """The current scale and the scheduler's state; the optimizer's state holds the rates themselves."""
        return {"factor": self._factor, "scheduler": self._scheduler and self._scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, data_degree: int) -> None:
        """Resume from `state_dict()` with `data_degree` replicas, after the optimizer's state was loaded."""
        self._factor = state["factor"]
        if self._scheduler is not None and state["scheduler"] is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self.rescale(data_degree)

    def _set(self, rates: Any) -> None:
        for group, rate in zip(self._optimizer.param_groups, list(rates), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # captured graphs read this tensor
            else:
                group["lr"] = rate


def _made(scheduler_fn: SchedulerFn, optimizer: Optimizer) -> LRScheduler:
    """The user's scheduler; one that `advance` could not step would raise after the first update."""
    if not callable(scheduler_fn):
        raise InvalidArgument(
            "scheduler_fn must be a function from the optimizer to a scheduler",
            hint="for example lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)",
            got=type(scheduler_fn).__name__,
        )
    made = scheduler_fn(optimizer)
    if not callable(getattr(made, "step", None)):
        raise InvalidArgument(
            "scheduler_fn must return a scheduler, which has a method step()",
            hint="for example lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)",
            got=type(made).__name__,
        )
    try:
        inspect.signature(made.step).bind()
    except TypeError:
        raise InvalidArgument(
            f"{type(made).__name__} is stepped with a number, and the Engine has none for it after an update",
            hint=f"leave scheduler_fn out, make {type(made).__name__}(engine.optimizer) and call its step(…) yourself,"
            " such as with engine.evaluate(loader), which is the same on every rank",
        ) from None
    return made


def _value(rate: float | Tensor) -> float:
    return float(rate)
