"""Gradients on their way off the device: gathered by unit, averaged over the ranks, put into the store."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from torsh_distributed.parallel.data.bucket_reduction import Reduce
from torsh_distributed.parallel.offload.paging.pager import Pager
from torsh_distributed.parallel.offload.paging.units import Unit
from torsh_distributed.parallel.offload.storage.mover import Ticket
from torsh_distributed.parallel.offload.storage.pieces import Piece
from torsh_distributed.parallel.offload.storage.tiered_storage import Entry, Store


class Gradients:
    """Takes each gradient as backward makes it, and lets none wait on the device longer than its unit's others.

    All ranks reduce the units in one fixed order, the reverse of forward with the model's own unit last, whatever
    order their gradients come in; a unit that a rank did not use travels as zeros, at the end of backward.
    """

    def __init__(self, units: Sequence[Unit], pieces: Sequence[Sequence[Piece]], *, store: Store, pager: Pager) -> None:
        self._units = units
        self._pieces = pieces
        self._store = store
        self._pager = pager
        self._reducer: Reduce | None = None
        self._num_ranks = 1
        self._order = [unit for unit in reversed(units) if unit.num_trainable]
        self._complete: set[int] = set()
        self._next = 0
        """How many units of the order have been reduced in this backward."""
        self._reducing: deque[tuple[Unit, torch.futures.Future[Tensor]]] = deque()
        self._leaving: deque[tuple[int, Tensor, Ticket]] = deque()
        self.is_syncing = True
        """Whether this backward ends a step: the others' gradients are added then, and not before."""

    def average(self, reducer: Reduce, num_ranks: int) -> None:
        """From here on gradients are averaged over the ranks that `reducer` sums over."""
        self._reducer, self._num_ranks = reducer, num_ranks

    def take(self, unit: Unit, position: int) -> bool:
        """Move the gradient of a unit's parameter into its buffer; says whether it was the last of the unit."""
        place = unit.places[position]
        grad = place.param.grad
        assert grad is not None, "called when it has just been computed"
        target = self._buffer(unit)[place.start : place.stop]
        if position in unit.arrived or (position in unit.present and not self._is_moved_off(unit)):
            target += grad.flatten()
        else:
            target.copy_(grad.flatten())
        place.param.grad = None
        unit.arrived.add(position)
        unit.present.add(position)
        return len(unit.arrived) == unit.num_trainable

    def complete(self, unit: Unit) -> None:
        """All gradients of `unit` are there, or it is the end of backward."""
        if unit.index in self._complete:
            return
        self._complete.add(unit.index)
        if self._reducer is None or not self.is_syncing:
            if unit.grad is not None:
                self._add_earlier(unit)
                self._settle(unit)
            return
        while self._next < len(self._order) and self._order[self._next].index in self._complete:
            self._reduce(self._order[self._next])
            self._next += 1

    def end_backward(self) -> None:
        """Finish what is under way; afterwards every gradient is where the update looks for it."""
        for unit in self._order:
            self.complete(unit)
        while self._reducing:
            self._finish_oldest()
        for unit in self._units:
            unit.arrived.clear()
        self._complete.clear()
        self._next = 0

    def clear(self) -> None:
        """Forget all gradients."""
        # After a backward that raised, sums may be under way; their buffers are given up, not waited for.
        self._reducing.clear()
        self._complete.clear()
        self._next = 0
        self.settle()
        for unit in self._units:
            unit.present.clear()
            unit.arrived.clear()
            unit.sq_norm = unit.flags = None
            if unit.grad is not None:
                self._pager.ledger.refund(unit.grad_bytes)
                unit.grad = None

    def settle(self) -> None:
        """Wait until everything on its way to the host is there, and learn which parameters any rank has used."""
        while self._leaving:
            self._reclaim()
        for unit in self._units:
            if unit.flags is not None:
                unit.present = {position for position, count in enumerate(unit.flags.tolist()) if count}
                unit.flags = None

    def norm(self) -> Tensor:
        """The 2-norm of all gradients of this step, as one fp32 value on the device."""
        squares = [unit.sq_norm for unit in self._units if unit.sq_norm is not None]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    def _is_moved_off(self, unit: Unit) -> bool:
        return any(piece.grad is not None for piece in self._pieces[unit.index])

    def _buffer(self, unit: Unit) -> Tensor:
        if unit.grad is None:
            what = f"the gradients of {unit.name}"
            # Those on their way out free their room first; then idle units make some.
            while (self._leaving or self._reducing) and self._pager.ledger.free_bytes < unit.grad_bytes:
                if not self._leaving:
                    self._finish_oldest()
                if self._leaving:
                    self._reclaim()
            self._pager.need_room(unit.grad_bytes, what)
            unit.grad = torch.zeros(unit.grad_numel, dtype=unit.dtype, device=unit.flat.device)
        return unit.grad

    def _add_earlier(self, unit: Unit) -> None:
        """Add what earlier microbatches of this step left in the store."""
        if unit.sq_norm is None or not self._is_moved_off(unit):
            return
        self.settle()
        buffer = self._buffer(unit)
        for piece in self._pieces[unit.index]:
            if isinstance(piece.grad, Entry):
                held = piece.grad.view()
                assert held is not None, "gradients are held as plain numbers"
                buffer[piece.start : piece.stop] += held.to(buffer.device, non_blocking=True)
                self._store.traffic.host_to_device_bytes += held.numel() * held.element_size()

    def _reduce(self, unit: Unit) -> None:
        """Start averaging over the ranks; the unit before has had the time of this one's backward to arrive."""
        assert self._reducer is not None
        self._add_earlier(unit)
        buffer = self._buffer(unit)
        flags = buffer[unit.trainable_numel :]
        flags.zero_()
        if unit.present:
            flags[torch.tensor(sorted(unit.present), device=flags.device)] = 1
        while self._reducing:
            self._finish_oldest()
        buffer[: unit.trainable_numel].div_(self._num_ranks)
        self._reducing.append((unit, self._reducer(buffer)))

    def _finish_oldest(self) -> None:
        unit, work = self._reducing.popleft()
        work.wait()
        assert unit.grad is not None
        # Looked at when the update comes: to look now would make Python wait for the GPU.
        unit.flags = unit.grad[unit.trainable_numel :].clone()
        self._settle(unit)

    def _settle(self, unit: Unit) -> None:
        """The gradients of `unit` are final for now: note their norm, and move them off if they are to go."""
        buffer = unit.grad
        assert buffer is not None
        unit.sq_norm = torch.linalg.vector_norm(buffer[: unit.trainable_numel], dtype=torch.float32).square()
        if not self._is_moved_off(unit):
            return

        def copy() -> None:
            for piece in self._pieces[unit.index]:
                if isinstance(piece.grad, Entry):
                    view = piece.grad.view()
                    assert view is not None, "gradients are held as plain numbers"
                    view.copy_(buffer[piece.start : piece.stop], non_blocking=True)
                    if piece.grad.is_on_disk:
                        self._store.traffic.disk_written_bytes += piece.grad.payload.numel()
                        piece.grad.region.cool()
                    self._store.traffic.device_to_host_bytes += view.numel() * view.element_size()

        self._leaving.append((unit.grad_bytes, buffer, self._pager.mover.start_out(copy)))
        unit.grad = None

    def _reclaim(self) -> None:
        num_bytes, _, ticket = self._leaving.popleft()
        ticket.finish()
        self._pager.ledger.refund(num_bytes)
