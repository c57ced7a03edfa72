"""OneCycle: rates rise and fall once, momentum the other way; then rates decay."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.deepspeed.schedules.base import NOT_STARTED, BatchSchedule

_log = logging.getLogger(__name__)

_SECOND_BETA = 0.99
"""DeepSpeed sets the second beta to this, whatever the optimizer had."""


@dataclass(frozen=True, kw_only=True)
class CycleShape:
    """The height of the cycle at a batch: 0 at both ends, 1 where its halves meet."""

    first: float
    """Batches in the rising half."""
    second: float
    first_stairs: int
    """Flat steps in the rising half; 0 rises with every batch."""
    second_stairs: int

    @property
    def total(self) -> float:
        """Batches in the cycle."""
        return self.first + self.second

    def height(self, batch: float) -> float:
        """From 0 to 1, for a batch of the cycle or of one that would follow it."""
        inside = batch % self.total
        if inside <= self.first:
            share, stairs = inside / self.first, self.first_stairs
            counted = inside * stairs / self.first
        else:
            share, stairs = (self.total - inside) / self.second, self.second_stairs
            counted = (self.total - inside) * stairs / self.second
        return math.floor(counted) / stairs if stairs > 0 else share


class OneCycle(BatchSchedule):
    """From `cycle_min_lr` to `cycle_max_lr` and back, then down from the minimum."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Any,
        cycle_max_lr: Any,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Any = 0.8,
        cycle_max_mom: Any = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = NOT_STARTED,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        second_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        if cycle_first_step_size <= 0 or second_size < 0:
            raise InvalidArgument(
                "cycle_first_step_size must be positive and cycle_second_step_size at least 0",
                cycle_first_step_size=cycle_first_step_size,
                cycle_second_step_size=cycle_second_step_size,
            )
        self.cycle = CycleShape(
            first=float(cycle_first_step_size),
            second=float(second_size),
            first_stairs=cycle_first_stair_count,
            second_stairs=second_stairs,
        )
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_lrs = self.per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self.per_group(cycle_max_lr, "cycle_max_lr")
        self.cycle_momentum = cycle_momentum and self._has_betas()
        self.min_moms = self.per_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self.per_group(cycle_max_mom, "cycle_max_mom")
        if last_batch_iteration == NOT_STARTED:
            self.set_rates(self.min_lrs)
            if self.cycle_momentum:
                self._set_momenta([(low, _SECOND_BETA) for low in self.min_moms])

    @override
    def get_lr(self) -> list[Any]:
        if self._is_in_cycle:
            height = self.cycle.height(self.last_batch_iteration + 1)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        factor = self._decay_factor(self.decay_lr_rate)
        return [low / factor for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group for the last batch; None if momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        height, factor = 0.0, 1.0
        if self._is_in_cycle:
            height = self.cycle.height(self.last_batch_iteration + 1)
        else:
            factor = self._decay_factor(self.decay_mom_rate)
        pairs = zip(self.min_moms, self.max_moms, strict=True)
        return [((high - (high - low) * height) * factor, _SECOND_BETA) for low, high in pairs]

    @override
    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)
        momenta = self.get_mom()
        if momenta is not None:
            self._set_momenta(momenta)

    @property
    def _is_in_cycle(self) -> bool:
        return self.last_batch_iteration < self.cycle.total

    def _decay_factor(self, rate: float) -> float:
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * (self.last_batch_iteration - self.cycle.total + 1) / self.decay_step_size

    def _has_betas(self) -> bool:
        if "betas" in self.optimizer.defaults:
            return True
        _log.warning("cycle_momentum has no effect: %s has no betas", type(self.optimizer).__name__)
        return False

    def _set_momenta(self, momenta: list[tuple[float, float]]) -> None:
        for group, betas in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = betas
