"""The pager: brings units to the device for use and keeps the device within its budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torsh_distributed.errors import MemoryAllocationFailed
from torsh_distributed.parallel.offload.offload_stats import PagerCounters
from torsh_distributed.parallel.offload.paging.units import Unit
from torsh_distributed.parallel.offload.storage.mover import Mover
from torsh_distributed.parallel.offload.storage.tiered_storage import StatePiece, StoredArray, TieredStorage
from torsh_distributed.parallel.offload.storage.tiers import MemoryBudget

_RAISE_ABOVE, _LOWER_BELOW = 0.9, 0.7
_RAISE_BY, _LOWER_BY = 1.5, 0.7


class Forecast:
    """Predicts uses of units (by index) from the previous step; for the first step, from the caller's `guess`."""

    def __init__(self, guess: Sequence[int], *, max_distance: int) -> None:
        self._learned = list(guess)
        self._seen: list[int] = []
        self._place = 0
        """The step's present position in the learned order."""
        self._max_distance = max_distance
        self._distance = float(min(2, max_distance))
        self._num_hits = 0

    @property
    def distance(self) -> int:
        """How many uses ahead to fetch; 0 fetches on demand."""
        return math.floor(self._distance)

    def note(self, index: int, *, is_hit: bool) -> None:
        """Record that unit `index` is used now; a hit is one that was fetched before."""
        self._seen.append(index)
        self._num_hits += is_hit
        if index in self._learned[self._place :]:
            self._place = self._learned.index(index, self._place) + 1

    def upcoming(self) -> list[int]:
        """The next uses within the distance, soonest first; not beyond this step, because the update follows it."""
        return self._learned[self._place : self._place + self.distance]

    def uses_until(self, index: int) -> float:
        """How many uses come before that of unit `index`, also in the next step; infinite if it is not predicted."""
        ahead = self._learned[self._place :] + self._learned[: self._place]
        return ahead.index(index) if index in ahead else math.inf

    def end_step(self) -> None:
        """Learn this step's order; increase the distance if most uses were hits, decrease it if few were."""
        if not self._seen:
            return
        hit_rate = self._num_hits / len(self._seen)
        if hit_rate > _RAISE_ABOVE:
            self._distance *= _RAISE_BY
        elif hit_rate < _LOWER_BELOW:
            self._distance *= _LOWER_BY
        self._distance = min(max(self._distance, 1.0), float(self._max_distance))
        self._learned, self._seen, self._place, self._num_hits = self._seen, [], 0, 0

    def shrink(self, factor: float) -> None:
        """Multiply the distance by `factor`, because memory is short."""
        self._distance = min(max(1.0, self._distance * factor), float(self._max_distance))


class Pager:
    """Fetches units ahead of their use and keeps as many as fit.

    To make room it evicts the unit whose next use, by the order of the last step, is farthest away. (Least recently
    used, the usual rule, would evict in backward what backward needs next.)
    """

    def __init__(
        self,
        units: Sequence[Unit],
        pieces: Sequence[Sequence[StatePiece]],
        *,
        storage: TieredStorage,
        budget: MemoryBudget,
        mover: Mover,
        forecast: Forecast,
    ) -> None:
        self.units = units
        self.counters = PagerCounters()
        self.budget = budget
        self.mover = mover
        self.forecast = forecast
        self._pieces = pieces
        self._storage = storage

    def demand(self, unit: Unit) -> None:
        """Bring `unit` to the device, attach its parameters, and start fetching the units after it."""
        if unit.is_in_use:
            return
        is_hit = unit.is_resident
        if not is_hit:
            self._fetch(unit)
        self.forecast.note(unit.index, is_hit=is_hit)
        self.counters.num_hits += is_hit
        self.counters.num_misses += not is_hit
        unit.is_in_use = True
        self.prefetch()
        if unit.pending_copy is not None:
            unit.pending_copy.wait()
            unit.pending_copy = None
        unit.attach()

    def release(self, unit: Unit) -> None:
        """Mark `unit` as idle; it stays on the device until its memory is needed."""
        if unit.is_in_use:
            unit.is_in_use = False
            unit.detach()

    def prefetch(self) -> None:
        """Fetch the next units of the forecast while there is room, evicting units that are needed later."""
        for index in self.forecast.upcoming():
            unit = self.units[index]
            if unit.is_resident:
                continue
            if not self._make_room(unit.num_bytes, keep_until=self.forecast.uses_until(index)):
                return
            self._fetch(unit)

    def need_room(self, num_bytes: int, what: str) -> None:
        """Charge the device for `what`, evicting idle units; MemoryAllocationFailed if units in use fill it."""
        self._make_room(num_bytes, keep_until=-1)
        self.budget.charge(num_bytes, what)

    def evict_idle(self, above_bytes: int) -> int:
        """Evict idle units, farthest next use first, until the device holds at most `above_bytes`; returns how many."""
        before = self.counters.num_evictions
        while self.budget.used_bytes > above_bytes and (victim := self._farthest(-1)) is not None:
            self._evict(victim)
        return self.counters.num_evictions - before

    def refresh(self, unit: Unit, start: int, values: Tensor) -> None:
        """Copy values that have changed, from element `start` on, to the device if the unit is there."""
        if not unit.is_resident:
            return
        target = unit.flat[start : start + values.numel()]
        if target.data_ptr() == values.data_ptr():
            return
        if values.device == target.device and target.device.type != "cpu":
            target.copy_(values)  # computed on the device, so ordered with its other work
            return

        def copy() -> None:
            target.copy_(values, non_blocking=True)

        # `begin_update` has finished older copies into this unit; newer ones run in order.
        unit.pending_copy = self.mover.start(copy, is_plain=True)
        self._count_in(values)

    def begin_update(self) -> None:
        """Wait for pending copies: the values they read are about to change."""
        self.mover.settle()
        for unit in self.units:
            unit.pending_copy = None

    def end_step(self) -> None:
        """After the update: learn the order of the step, and prefetch for the next forward."""
        self.forecast.end_step()
        self.prefetch()

    def _fetch(self, unit: Unit) -> None:
        try:
            self.need_room(unit.num_bytes, f"the parameters of {unit.name}")
        except MemoryAllocationFailed as error:
            in_use = [other.name for other in self.units if other.is_in_use]
            raise MemoryAllocationFailed(
                error.message, hint=error.hint, **error.context, units_in_use=in_use
            ) from error
        self.mover.fill(unit.flat, unit.num_bytes)
        unit.is_resident = True
        pieces = self._pieces[unit.index]
        is_plain = all(isinstance(piece.param, StoredArray) and piece.param.view() is not None for piece in pieces)
        unit.pending_copy = self.mover.start(lambda: self._copy_in(unit), is_plain=is_plain)

    def _copy_in(self, unit: Unit) -> None:
        for piece in self._pieces[unit.index]:
            array = piece.param
            assert isinstance(array, StoredArray), "only units with stored parameters are fetched"
            view = array.view()
            values = self._storage.load(array) if view is None else view
            if view is not None and array.is_on_disk:
                self._storage.traffic.disk_read_bytes += array.payload.numel()
            unit.flat[piece.start : piece.stop].copy_(values, non_blocking=True)
            array.allocation.drop_pages()
            self._count_in(values)

    def _count_in(self, values: Tensor) -> None:
        self._storage.traffic.host_to_device_bytes += values.numel() * values.element_size()

    def _make_room(self, num_bytes: int, *, keep_until: float) -> bool:
        """Evict idle units until `num_bytes` fit, but none used within `keep_until` uses; returns whether they fit."""
        while num_bytes > self.budget.free_bytes:
            victim = self._farthest(keep_until)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _farthest(self, keep_until: float) -> Unit | None:
        idle = [unit for unit in self.units if unit.is_resident and not unit.is_in_use and not unit.is_kept]
        if not idle:
            return None
        farthest = max(idle, key=lambda unit: self.forecast.uses_until(unit.index))
        return farthest if self.forecast.uses_until(farthest.index) > keep_until else None

    def _evict(self, unit: Unit) -> None:
        if unit.pending_copy is not None:
            unit.pending_copy.finish()
            unit.pending_copy = None
        self.mover.empty(unit.flat)
        unit.is_resident = False
        self.budget.refund(unit.num_bytes)
        self.counters.num_evictions += 1


def load_flat(unit: Unit, pieces: Sequence[StatePiece], storage: TieredStorage) -> Tensor:
    """All values of a unit as fp32 on the host, from the most precise copy."""
    flat = torch.empty(unit.numel)
    for piece in pieces:
        source = piece.master if piece.master is not None else piece.param
        if source is None:  # frozen, and always on the device
            flat[piece.start : piece.stop].copy_(unit.flat[piece.start : piece.stop])
        else:
            flat[piece.start : piece.stop].copy_(source if isinstance(source, Tensor) else storage.load(source))
    return flat
