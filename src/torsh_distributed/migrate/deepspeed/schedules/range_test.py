"""LRRangeTest: the rate rises without end, to find out how high a rate training stands."""

from __future__ import annotations

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
