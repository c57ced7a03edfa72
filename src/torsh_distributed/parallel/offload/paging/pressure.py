"""The pressure ladder: what is done, in which order, when a budget fills up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torsh_distributed import events
from torsh_distributed.parallel.offload.paging.pager import Pager
from torsh_distributed.parallel.offload.storage.forms import smaller_form
from torsh_distributed.parallel.offload.storage.tiered_storage import Store
from torsh_distributed.parallel.offload.storage.tiers import Ledger

StrategyName = Literal["conservative", "balanced", "aggressive", "extreme"]


@dataclass(frozen=True, kw_only=True)
class PressurePolicy:
    """When to act, and how hard."""

    threshold: float
    """Share of a budget above which something is done."""
    cold_share: float
    """Share of the state in host memory that may be moved to disk in one go."""
    prefetch_factor: float
    """What the prefetch distance is multiplied with."""
    may_round: bool
    """Whether optimizer state may be held in a smaller form: the one rung that changes results."""


POLICIES: dict[str, PressurePolicy] = {
    "conservative": PressurePolicy(threshold=0.9, cold_share=0.3, prefetch_factor=0.8, may_round=False),
    "balanced": PressurePolicy(threshold=0.75, cold_share=0.5, prefetch_factor=0.6, may_round=False),
    "aggressive": PressurePolicy(threshold=0.6, cold_share=0.8, prefetch_factor=0.4, may_round=False),
    "extreme": PressurePolicy(threshold=0.4, cold_share=0.95, prefetch_factor=0.25, may_round=True),
}
"""By the names of `offload.auto_memory_management`."""


class PressureLadder:
    """Climbed after every step until pressure is below the threshold; each rung that freed something is an event."""

    def __init__(self, policy: PressurePolicy, *, store: Store, pager: Pager | None) -> None:
        self._policy = policy
        self._store = store
        self._pager = pager

    def relieve(self) -> None:
        """Free unused, move cold state to disk, fetch less far ahead, hold state in a smaller form: in this order."""
        host = self._store.host.ledger
        if self._pager is not None and (self._is_high(self._pager.ledger) or self._is_high(host)):
            self._pager.begin_update()  # copies under way read what is about to move
        if self._pager is not None and self._is_high(self._pager.ledger):
            self._act("free unused", self._pager.ledger, self._free_unused)
        if self._is_high(host) and self._store.disk is not None:
            self._act("offload cold", host, self._offload_cold)
        if self._pager is not None and self._is_high(self._pager.ledger):
            self._act("shrink prefetch", self._pager.ledger, self._shrink_prefetch)
        if self._is_high(host) and self._policy.may_round:
            self._act("smaller form", host, self._hold_smaller)

    def _is_high(self, ledger: Ledger) -> bool:
        return ledger.pressure > self._policy.threshold

    def _act(self, action: str, ledger: Ledger, act: Callable[[], bool]) -> None:
        before = ledger.used_bytes
        if act():
            events.emit(
                events.PressureEvent(
                    action=action,
                    memory=ledger.name,
                    before_bytes=before,
                    after_bytes=ledger.used_bytes,
                    budget_bytes=ledger.budget_bytes,
                )
            )

    def _free_unused(self) -> bool:
        assert self._pager is not None
        return self._pager.evict_idle(int(self._policy.threshold * self._pager.ledger.budget_bytes)) > 0

    def _shrink_prefetch(self) -> bool:
        """Frees nothing now; the next step fetches less ahead."""
        assert self._pager is not None
        before = self._pager.forecast.distance
        self._pager.forecast.shrink(self._policy.prefetch_factor)
        return self._pager.forecast.distance != before

    def _offload_cold(self) -> bool:
        """Least recently used first, as long as the disk's budget takes it."""
        assert self._store.disk is not None
        here = sorted(
            (entry for entry in self._store.entries if not entry.is_on_disk), key=lambda entry: entry.last_use
        )
        left = self._policy.cold_share * sum(entry.payload.numel() for entry in here)
        has_moved = False
        for entry in here:
            left -= entry.payload.numel()
            if left < 0 or not self._is_high(self._store.host.ledger):
                break
            if self._store.disk.has_room(entry.payload.numel()):
                self._store.demote(entry)
                has_moved = True
        return has_moved

    def _hold_smaller(self) -> bool:
        """Optimizer moments only: parameters and gradients keep the form the user chose."""
        moments = [entry for entry in self._store.entries if entry.is_optimizer_state and not entry.is_on_disk]
        has_changed = False
        for entry in sorted(moments, key=lambda entry: entry.last_use):
            form = smaller_form(entry.form)
            if form is None or not self._is_high(self._store.host.ledger):
                continue
            self._store.reform(entry, form)
            has_changed = True
        return has_changed
