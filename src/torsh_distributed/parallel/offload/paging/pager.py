"""The pager: units are on the device when they are needed, and its memory stays within the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torsh_distributed.errors import MemoryAllocationFailed
from torsh_distributed.parallel.offload.paging.forecast import Forecast
from torsh_distributed.parallel.offload.paging.units import Unit
from torsh_distributed.parallel.offload.storage.mover import Mover
from torsh_distributed.parallel.offload.storage.pieces import Piece
from torsh_distributed.parallel.offload.storage.tiered_storage import Entry, Store
from torsh_distributed.parallel.offload.storage.tiers import Ledger


@dataclass
class Tally:
    """What the pager counts."""

    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0


class Pager:
    """Fetches units ahead of their use and keeps as many as fit.

    Which one goes when room is needed: the one whose next use, by the order of the last step, is farthest away. (Least
    recently used, the usual rule, would throw out in backward what backward needs next.)
    """

    def __init__(
        self,
        units: Sequence[Unit],
        pieces: Sequence[Sequence[Piece]],
        *,
        store: Store,
        ledger: Ledger,
        mover: Mover,
        forecast: Forecast,
    ) -> None:
        self.units = units
        self.tally = Tally()
        self.ledger = ledger
        self.mover = mover
        self.forecast = forecast
        self._pieces = pieces
        self._store = store

    def demand(self, unit: Unit) -> None:
        """Have `unit` on the device, its parameters usable, and start fetching what comes after it."""
        if unit.is_in_use:
            return
        is_hit = unit.is_resident
        if not is_hit:
            self._fetch(unit)
        self.forecast.note(unit.index, is_hit=is_hit)
        self.tally.num_hits += is_hit
        self.tally.num_misses += not is_hit
        unit.is_in_use = True
        self.prefetch()
        if unit.ticket is not None:
            unit.ticket.wait()
            unit.ticket = None
        unit.attach()

    def release(self, unit: Unit) -> None:
        """`unit` has done its work for now; it stays as long as its room is not needed."""
        if unit.is_in_use:
            unit.is_in_use = False
            unit.detach()

    def prefetch(self) -> None:
        """Fetch the next units of the forecast as far as there is room, or units needed later to make it."""
        for index in self.forecast.upcoming():
            unit = self.units[index]
            if unit.is_resident:
                continue
            if not self._make_room(unit.num_bytes, keep_until=self.forecast.uses_until(index)):
                return
            self._fetch(unit)

    def need_room(self, num_bytes: int, what: str) -> None:
        """Charge the device for `what`, evicting idle units; MemoryAllocationFailed if those at work fill it."""
        self._make_room(num_bytes, keep_until=-1)
        self.ledger.charge(num_bytes, what)

    def evict_idle(self, above_bytes: int) -> int:
        """Drop idle units, farthest next use first, until the device holds at most `above_bytes`; returns how many."""
        before = self.tally.num_evictions
        while self.ledger.used_bytes > above_bytes and (victim := self._farthest(-1)) is not None:
            self._evict(victim)
        return self.tally.num_evictions - before

    def refresh(self, unit: Unit, start: int, values: Tensor) -> None:
        """The values from element `start` on have changed: bring them to the device if the unit is there."""
        if not unit.is_resident:
            return
        target = unit.flat[start : start + values.numel()]
        if target.data_ptr() == values.data_ptr():
            return
        if values.device == target.device and target.device.type != "cpu":
            target.copy_(values)  # computed on the device, so in order with what computes there
            return

        def copy() -> None:
            target.copy_(values, non_blocking=True)

        # No older copy into this unit can be under way (`begin_update`); newer ones wait for each other in order.
        unit.ticket = self.mover.start(copy, is_plain=True)
        self._count_in(values)

    def begin_update(self) -> None:
        """Wait for the copies under way: what they read is about to change."""
        self.mover.settle()
        for unit in self.units:
            unit.ticket = None

    def end_step(self) -> None:
        """The update is done: learn, and fetch for the next forward."""
        self.forecast.end_step()
        self.prefetch()

    def _fetch(self, unit: Unit) -> None:
        try:
            self.need_room(unit.num_bytes, f"the parameters of {unit.name}")
        except MemoryAllocationFailed as error:
            at_work = [other.name for other in self.units if other.is_in_use]
            raise MemoryAllocationFailed(
                error.message, hint=error.hint, **error.context, units_at_work=at_work
            ) from error
        self.mover.fill(unit.flat, unit.num_bytes)
        unit.is_resident = True
        pieces = self._pieces[unit.index]
        is_plain = all(isinstance(piece.param, Entry) and piece.param.view() is not None for piece in pieces)
        unit.ticket = self.mover.start(lambda: self._copy_in(unit), is_plain=is_plain)

    def _copy_in(self, unit: Unit) -> None:
        for piece in self._pieces[unit.index]:
            entry = piece.param
            assert isinstance(entry, Entry), "only units with stored parameters leave the device"
            view = entry.view()
            values = self._store.load(entry) if view is None else view
            if view is not None and entry.is_on_disk:
                self._store.traffic.disk_read_bytes += entry.payload.numel()
            unit.flat[piece.start : piece.stop].copy_(values, non_blocking=True)
            entry.region.cool()
            self._count_in(values)

    def _count_in(self, values: Tensor) -> None:
        self._store.traffic.host_to_device_bytes += values.numel() * values.element_size()

    def _make_room(self, num_bytes: int, *, keep_until: float) -> bool:
        """Evict idle units until `num_bytes` fit; those used within `keep_until` uses stay. Says whether they fit."""
        while num_bytes > self.ledger.free_bytes:
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
        if unit.ticket is not None:
            unit.ticket.finish()
            unit.ticket = None
        self.mover.empty(unit.flat)
        unit.is_resident = False
        self.ledger.refund(unit.num_bytes)
        self.tally.num_evictions += 1


def load_flat(unit: Unit, pieces: Sequence[Piece], store: Store) -> Tensor:
    """All values of a unit as fp32 on the host, from the most precise copy there is."""
    flat = torch.empty(unit.numel)
    for piece in pieces:
        source = piece.master if piece.master is not None else piece.param
        if source is None:  # frozen, and never away from the device
            flat[piece.start : piece.stop].copy_(unit.flat[piece.start : piece.stop])
        else:
            flat[piece.start : piece.stop].copy_(source if isinstance(source, Tensor) else store.load(source))
    return flat
