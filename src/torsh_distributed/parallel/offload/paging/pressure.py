"""Relieves memory pressure: what to do, and in which order, when a budget fills up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torsh_distributed import events
from torsh_distributed.parallel.offload.paging.pager import Pager
from torsh_distributed.parallel.offload.storage.forms import smaller_form
from torsh_distributed.parallel.offload.storage.tiered_storage import TieredStorage
from torsh_distributed.parallel.offload.storage.tiers import MemoryBudget


@dataclass(frozen=True, kw_only=True)
class PressurePolicy:
    """When to act, and how much."""

    threshold: float
    """Share of a budget above which to act."""
    cold_share: float
    """Share of the state in host memory that one step may move to disk."""
    prefetch_factor: float
    """The prefetch distance is multiplied by it."""
    may_round: bool
    """Whether optimizer state may change to a smaller form: the only action that changes results."""


POLICIES: dict[str, PressurePolicy] = {
    "conservative": PressurePolicy(threshold=0.9, cold_share=0.3, prefetch_factor=0.8, may_round=False),
    "balanced": PressurePolicy(threshold=0.75, cold_share=0.5, prefetch_factor=0.6, may_round=False),
    "aggressive": PressurePolicy(threshold=0.6, cold_share=0.8, prefetch_factor=0.4, may_round=False),
    "extreme": PressurePolicy(threshold=0.4, cold_share=0.95, prefetch_factor=0.25, may_round=True),
}
"""By the names of `offload.auto_memory_management`."""


class PressureRelief:
    """Acts after every step until pressure is below the threshold; each action that had an effect emits an event."""

    def __init__(self, policy: PressurePolicy, *, storage: TieredStorage, pager: Pager | None) -> None:
        self._policy = policy
        self._storage = storage
        self._pager = pager

    def relieve(self) -> None:
        """In this order: evict idle units, move cold state to disk, prefetch less, store state in a smaller form."""
        host = self._storage.host.budget
        if self._pager is not None and (self._is_high(self._pager.budget) or self._is_high(host)):
            self._pager.begin_update()  # pending copies read what is about to move
        if self._pager is not None and self._is_high(self._pager.budget):
            self._act("free unused", self._pager.budget, self._free_unused)
        if self._is_high(host) and self._storage.disk is not None:
            self._act("offload cold", host, self._offload_cold)
        if self._pager is not None and self._is_high(self._pager.budget):
            self._act("shrink prefetch", self._pager.budget, self._shrink_prefetch)
        if self._is_high(host) and self._policy.may_round:
            self._act("smaller form", host, self._hold_smaller)

    def _is_high(self, budget: MemoryBudget) -> bool:
        return budget.pressure > self._policy.threshold

    def _act(self, action: str, budget: MemoryBudget, act: Callable[[], bool]) -> None:
        before = budget.used_bytes
        if act():
            events.emit(
                events.PressureEvent(
                    action=action,
                    memory=budget.name,
                    before_bytes=before,
                    after_bytes=budget.used_bytes,
                    budget_bytes=budget.limit_bytes,
                )
            )

    def _free_unused(self) -> bool:
        assert self._pager is not None
        return self._pager.evict_idle(int(self._policy.threshold * self._pager.budget.limit_bytes)) > 0

    def _shrink_prefetch(self) -> bool:
        """Frees nothing now; the next step prefetches less."""
        assert self._pager is not None
        before = self._pager.forecast.distance
        self._pager.forecast.shrink(self._policy.prefetch_factor)
        return self._pager.forecast.distance != before

    def _offload_cold(self) -> bool:
        """Least recently used first, while the disk's budget has room."""
        assert self._storage.disk is not None
        here = sorted(
            (array for array in self._storage.arrays if not (array.is_on_disk or array.is_fixed)),
            key=lambda array: array.last_use,
        )
        left = self._policy.cold_share * sum(array.payload.numel() for array in here)
        has_moved = False
        for array in here:
            left -= array.payload.numel()
            if left < 0 or not self._is_high(self._storage.host.budget):
                break
            if self._storage.disk.has_room(array.payload.numel()):
                self._storage.move_to_disk(array)
                has_moved = True
        return has_moved

    def _hold_smaller(self) -> bool:
        """Only optimizer moments: parameters and gradients keep the form the user chose."""
        moments = [array for array in self._storage.arrays if array.is_optimizer_state and not array.is_on_disk]
        has_changed = False
        for array in sorted(moments, key=lambda array: array.last_use):
            form = smaller_form(array.form)
            if form is None or not self._is_high(self._storage.host.budget):
                continue
            self._storage.change_form(array, form)
            has_changed = True
        return has_changed
