"""Schedules that begin with a warm-up: WarmupLR, WarmupDecayLR, WarmupCosineLR.

The warm-up is logarithmic unless `warmup_type` says linear, which no schedule of torch can express.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from typing_extensions import override

from torsh_distributed.migrate.deepspeed.schedules.base import NOT_STARTED, BatchSchedule, positive_steps


class LRRangeTest(BatchSchedule):
    """`lr_range_test_min_lr`, plus that times `lr_range_test_step_rate` every `lr_range_test_step_size` batches."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Any = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = NOT_STARTED,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self.per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = positive_steps(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == NOT_STARTED:
            self.set_rates(self.min_lr)

    @override
    def get_lr(self) -> list[Any]:
        passed = (self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(passed) if self.staircase else passed)
        return [rate * increase for rate in self.min_lr]


_log = logging.getLogger(__name__)


class WarmupShape:
    """How far a warm-up has come, from 0 to 1: with the logarithm of the batch, or linearly."""

    def __init__(self, warmup_num_steps: Any, warmup_type: str) -> None:
        if warmup_type not in ("log", "linear"):
            _log.warning(
                "warmup_type %r is unknown: log is used, as DeepSpeed does; it knows log and linear", warmup_type
            )
            warmup_type = "log"
        self.type = warmup_type
        self.num_steps = max(2, positive_steps(warmup_num_steps, "warmup_num_steps"))

    def share(self, batch: int) -> float | None:
        """The share reached at a batch; None once the warm-up is over."""
        if batch >= self.num_steps:
            return None
        return batch / self.num_steps if self.type == "linear" else math.log(batch + 1) / math.log(self.num_steps)


class WarmupLR(BatchSchedule):
    """From `warmup_min_lr` to `warmup_max_lr`, then constant. Without a maximum: the optimizer's own rates."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = NOT_STARTED,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup = WarmupShape(warmup_num_steps, warmup_type)
        self.warmup_num_steps = self.warmup.num_steps
        highest = [group["lr"] for group in self.optimizer.param_groups] if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = self.per_group(warmup_min_lr, "warmup_min_lr")
        # float: a rate that is a tensor is filled in place below, and would take the maximum with it.
        self.max_lrs = [float(rate) for rate in self.per_group(highest, "warmup_max_lr")]
        if last_batch_iteration == NOT_STARTED:
            self.set_rates(self.get_lr())

    @override
    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        reached = self.warmup.share(self.last_batch_iteration)
        share = self.share_after_warmup() if reached is None else reached
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def share_after_warmup(self) -> float:
        """Where between the two rates the schedule is once it has warmed up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Warm up, then fall linearly to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = NOT_STARTED,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_if_too_short(total_num_steps, self.warmup_num_steps)

    @override
    def share_after_warmup(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(BatchSchedule):
    """Shares of the optimizer's own rates: up from `warmup_min_ratio` to 1, then along a cosine to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = NOT_STARTED,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup = WarmupShape(warmup_num_steps, warmup_type)
        self.warmup_num_steps = self.warmup.num_steps
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        _warn_if_too_short(total_num_steps, self.warmup_num_steps)
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        if last_batch_iteration == NOT_STARTED:
            self.set_rates(self.get_lr())

    @override
    def get_lr(self) -> list[Any]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """The share of the optimizer's own rates at the last batch; 0 before the first step."""
        if self.last_batch_iteration < 0:
            return 0.0
        reached = self.warmup.share(self.last_batch_iteration)
        if reached is not None:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * reached
        num_falling = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / num_falling)
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)


def _warn_if_too_short(total_num_steps: int, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps:
        _log.warning("total_num_steps %s is below warmup_num_steps %s", total_num_steps, warmup_num_steps)
