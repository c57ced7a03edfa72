"""Gradients on their way off the device: collected by unit, averaged over the ranks, stored."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from torsh_distributed.parallel.data.bucket_reduction import Reduce
from torsh_distributed.parallel.offload.paging.pager import Pager
from torsh_distributed.parallel.offload.paging.units import Unit
from torsh_distributed.parallel.offload.storage.mover import PendingCopy
from torsh_distributed.parallel.offload.storage.tiered_storage import StatePiece, StoredArray, TieredStorage


class UnitGradients:
    """Takes each gradient as backward computes it, and moves a unit's gradients off the device when it has them all.

    All ranks reduce the units in one fixed order, the reverse of forward with the root unit last, whatever order
    their gradients arrive in; a unit that a rank did not use is sent as zeros at the end of backward.
    """

    def __init__(
        self, units: Sequence[Unit], pieces: Sequence[Sequence[StatePiece]], *, storage: TieredStorage, pager: Pager
    ) -> None:
        self._units = units
        self._pieces = pieces
        self._storage = storage
        self._pager = pager
        self._reducer: Reduce | None = None
        self._num_ranks = 1
        self._order = [unit for unit in reversed(units) if unit.num_trainable]
        self._complete: set[int] = set()
        self._next = 0
        """How many units of `_order` have been reduced in this backward."""
        self._reducing: deque[tuple[Unit, torch.futures.Future[Tensor]]] = deque()
        self._leaving: deque[tuple[int, Tensor, PendingCopy]] = deque()
        self.is_syncing = True
        """Whether this backward ends a step: only then gradients are averaged over the ranks."""

    def average(self, reducer: Reduce, num_ranks: int) -> None:
        """Average gradients from now on over the ranks that `reducer` sums over."""
        self._reducer, self._num_ranks = reducer, num_ranks

    def take(self, unit: Unit, position: int) -> bool:
        """Move the gradient of a parameter into its unit's buffer; returns whether it is the last of the unit."""
        entry = unit.param_ranges[position]
        grad = entry.param.grad
        assert grad is not None, "called right after it is computed"
        target = self._buffer(unit)[entry.start : entry.stop]
        if position in unit.arrived or (position in unit.present and not self._is_moved_off(unit)):
            target += grad.flatten()
        else:
            target.copy_(grad.flatten())
        entry.param.grad = None
        unit.arrived.add(position)
        unit.present.add(position)
        return len(unit.arrived) == unit.num_trainable

    def complete(self, unit: Unit) -> None:
        """Called when all gradients of `unit` have arrived, and at the end of backward."""
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
        """Finish pending reductions; afterwards every gradient is where the update reads it."""
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
        # After a backward that raised, reductions may be pending; drop their buffers without waiting.
        self._reducing.clear()
        self._complete.clear()
        self._next = 0
        self.settle()
        for unit in self._units:
            unit.present.clear()
            unit.arrived.clear()
            unit.sq_norm = unit.flags = None
            if unit.grad is not None:
                self._pager.budget.refund(unit.grad_bytes)
                unit.grad = None

    def settle(self) -> None:
        """Wait for pending copies to the host, and read which parameters any rank has used."""
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
            # First free the buffers on their way out; then evict idle units.
            while (self._leaving or self._reducing) and self._pager.budget.free_bytes < unit.grad_bytes:
                if not self._leaving:
                    self._finish_oldest()
                if self._leaving:
                    self._reclaim()
            self._pager.need_room(unit.grad_bytes, what)
            unit.grad = torch.zeros(unit.grad_numel, dtype=unit.dtype, device=unit.flat.device)
        return unit.grad

    def _add_earlier(self, unit: Unit) -> None:
        """Add the stored gradients of this step's earlier microbatches."""
        if unit.sq_norm is None or not self._is_moved_off(unit):
            return
        self.settle()
        buffer = self._buffer(unit)
        for piece in self._pieces[unit.index]:
            if isinstance(piece.grad, StoredArray):
                held = piece.grad.view()
                assert held is not None, "gradients are stored as plain numbers"
                buffer[piece.start : piece.stop] += held.to(buffer.device, non_blocking=True)
                self._storage.traffic.host_to_device_bytes += held.numel() * held.element_size()

    def _reduce(self, unit: Unit) -> None:
        """Start averaging over the ranks; the previous unit's reduction overlapped with this one's backward."""
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
        # Read before the update: reading it now would make Python wait for the GPU.
        unit.flags = unit.grad[unit.trainable_numel :].clone()
        self._settle(unit)

    def _settle(self, unit: Unit) -> None:
        """Record the norm of a unit's finished gradients, and move them off the device if they are stored."""
        buffer = unit.grad
        assert buffer is not None
        unit.sq_norm = torch.linalg.vector_norm(buffer[: unit.trainable_numel], dtype=torch.float32).square()
        if not self._is_moved_off(unit):
            return

        def copy() -> None:
            for piece in self._pieces[unit.index]:
                if isinstance(piece.grad, StoredArray):
                    view = piece.grad.view()
                    assert view is not None, "gradients are stored as plain numbers"
                    view.copy_(buffer[piece.start : piece.stop], non_blocking=True)
                    if piece.grad.is_on_disk:
                        self._storage.traffic.disk_written_bytes += piece.grad.payload.numel()
                        piece.grad.allocation.drop_pages()
                    self._storage.traffic.device_to_host_bytes += view.numel() * view.element_size()

        self._leaving.append((unit.grad_bytes, buffer, self._pager.mover.start_out(copy)))
        unit.grad = None

    def _reclaim(self) -> None:
        num_bytes, _, pending_copy = self._leaving.popleft()
        pending_copy.finish()
        self._pager.budget.refund(num_bytes)
