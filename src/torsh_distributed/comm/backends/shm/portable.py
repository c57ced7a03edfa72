"""The portable core: the same collectives in Python and torch, for installs without a compiler.

Simpler than the compiled one, and several times slower on small tensors: chunks are not pipelined, and every
synchronisation is a round of semaphores. `native/core.h` has the note on steps and slots.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torsh_distributed.comm.backends.shm import semaphores
from torsh_distributed.comm.backends.shm.codes import DTYPES, OPERATIONS, REDUCTIONS, Status
from torsh_distributed.comm.backends.shm.core import Receipt
from torsh_distributed.comm.backends.shm.portable_layout import PortableLayout, PortableView, Signature
from torsh_distributed.comm.backends.shm.portable_messages import PortableMessages
from torsh_distributed.comm.backends.shm.segment import SharedSegment
from torsh_distributed.comm.folding import fold_all

_SLICE_S = 0.04
"""How often a waiter checks whether the group was aborted or a peer died."""
_YIELD_NS = 100_000
_DTYPE_OF = {code: dtype for dtype, code in DTYPES.items()}
_REDUCTION_OF = {code: op for op, code in REDUCTIONS.items()}
_OPERATION = {name: code for code, name in OPERATIONS.items()}
_LINE_BYTES = 128


class _CoreStopped(Exception):
    """Carries a status to the end of a call."""

    def __init__(self, status: Status, subject: int = -1) -> None:
        super().__init__(status)
        self.status = status
        self.subject = subject


class PortableCore:
    """One rank's view of a portable segment; see `core.Core` for what the methods do."""

    VERSION = 1

    def __init__(self, layout: PortableLayout, segment: SharedSegment, *, rank: int, spin_ns: int) -> None:
        self._view = PortableView(layout, segment, rank)
        self._rank = rank
        self._num_ranks = layout.num_ranks
        self._slot_bytes = layout.slot_bytes
        self._spin_ns = spin_ns
        self._step = 0
        self._sequence = 0
        self._deadline = 0.0
        self._subject = -1
        self._missing: list[int] = []
        self._messages = PortableMessages(self._view)

    # --- meeting ----------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Arrive, and wait until all ranks have arrived."""
        self._step += 1
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        for rank in others:
            semaphores.post(self._view.door(self._rank, rank))
        self._missing = others
        while self._missing:
            self._await(self._missing[0])
            self._missing = self._missing[1:]

    def _await(self, rank: int) -> None:
        door = self._view.door(rank, self._rank)
        if self._watch(door):
            return
        while True:
            remaining_s = self._deadline - time.monotonic()
            if semaphores.take(door, max(min(_SLICE_S, remaining_s), 0.001)):
                return
            obstacle = self._obstacle(rank)
            if obstacle is not None:
                if semaphores.try_take(door):  # it arrived before it left
                    return
                if obstacle.status is not Status.POISONED:
                    self._view.poison(obstacle.status, obstacle.subject, "")
                self._missing = [one for one in self._missing if not self._has_come(one)]
                raise obstacle

    def _watch(self, door: int) -> bool:
        """Spin for a while before sleeping; where ranks share cores, yield the core each time."""
        end_ns = time.monotonic_ns() + (self._spin_ns or _YIELD_NS)
        while not semaphores.try_take(door):
            if time.monotonic_ns() >= end_ns:
                return False
            if not self._spin_ns:
                os.sched_yield()
        return True

    def _has_come(self, rank: int) -> bool:
        return semaphores.value(self._view.door(rank, self._rank)) > 0

    def _obstacle(self, rank: int) -> _CoreStopped | None:
        if self._view.failure() is not None:
            return _CoreStopped(Status.POISONED)
        if self._view.is_left(rank):
            return _CoreStopped(Status.LEFT, rank)
        if not self._view.is_alive(rank):
            return _CoreStopped(Status.DEAD, rank)
        return _CoreStopped(Status.TIMEOUT) if time.monotonic() >= self._deadline else None

    def _meet_as(self, name: str, dtype: int, reduction: int, root: int, num_bytes: int) -> None:
        """The first synchronisation of a collective: every rank writes what it was called with, and all compare."""
        self._sequence += 1
        mine: Signature = (_OPERATION[name], dtype, reduction, root, num_bytes)
        self._view.write_signature(self._sequence % 2, mine)
        self._meet()
        for rank in range(self._num_ranks):
            if self._view.signature(rank, self._sequence % 2) != mine:
                raise self._mismatch(rank)

    def _mismatch(self, rank: int) -> _CoreStopped:
        self._view.poison(Status.MISMATCH, rank, "")
        return _CoreStopped(Status.MISMATCH, rank)

    def _run(self, timeout_ns: int, body: Callable[[], None]) -> int:
        self._deadline = time.monotonic() + timeout_ns / 1e9
        self._subject = -1
        if self._view.failure() is not None:
            return Status.POISONED
        try:
            body()
        except _CoreStopped as stop:
            self._subject = stop.subject
            return stop.status
        return Status.OK

    # --- reductions -------------------------------------------------------------------------------------------

    def all_reduce(
        self, address: int, numel: int, dtype: int, reduction: int, timeout_ns: int, is_background: bool, /
    ) -> int:
        """Fold in place on every rank."""
        return self._run(timeout_ns, lambda: self._reduce("all_reduce", address, numel, dtype, reduction, -1))

    def reduce(
        self, address: int, numel: int, dtype: int, reduction: int, root: int, timeout_ns: int, is_background: bool, /
    ) -> int:
        """Fold in place on the root."""
        return self._run(timeout_ns, lambda: self._reduce("reduce", address, numel, dtype, reduction, root))

    def _reduce(self, name: str, address: int, numel: int, dtype: int, reduction: int, root: int) -> None:
        size = _DTYPE_OF[dtype].itemsize
        chunk = self._slot_bytes // size
        for start in range(0, numel, chunk) or [0]:
            count = min(chunk, numel - start)
            at = address + start * size
            first, last = (_share(count, size, rank, self._num_ranks) for rank in (self._rank, self._rank + 1))
            step = self._step + 1
            ctypes.memmove(self._view.slot(self._rank, step), at, count * size)
            if start == 0:
                self._meet_as(name, dtype, reduction, root, numel * size)
            else:
                self._meet()
            inputs = [
                _tensor(self._view.slot(rank, step) + first * size, last - first, dtype)
                for rank in range(self._num_ranks)
            ]
            _tensor(self._view.result_slot(step) + first * size, last - first, dtype).copy_(
                fold_all(inputs, _REDUCTION_OF[reduction])
            )
            self._meet()
            if root in (-1, self._rank):
                ctypes.memmove(at, self._view.result_slot(step), count * size)

    def reduce_scatter(
        self,
        out: int,
        sources: tuple[int, ...],
        numels: tuple[int, ...],
        dtype: int,
        reduction: int,
        timeout_ns: int,
        is_background: bool,
        /,
    ) -> int:
        """Fold one source per rank, keep this rank's."""

        def body() -> None:
            size = _DTYPE_OF[dtype].itemsize
            chunk = self._slot_bytes // self._num_ranks // size
            for start in range(0, max(numels), chunk) or [0]:
                step = self._step + 1
                for rank, (source, numel) in enumerate(zip(sources, numels, strict=True)):
                    count = max(min(chunk, numel - start), 0)
                    to = self._view.slot(self._rank, step) + rank * chunk * size
                    ctypes.memmove(to, source + start * size, count * size)
                if start == 0:
                    self._meet_as("reduce_scatter", dtype, reduction, -1, sum(numels) * size)
                else:
                    self._meet()
                count = max(min(chunk, numels[self._rank] - start), 0)
                inputs = [
                    _tensor(self._view.slot(rank, step) + self._rank * chunk * size, count, dtype)
                    for rank in range(self._num_ranks)
                ]
                _tensor(out + start * size, count, dtype).copy_(fold_all(inputs, _REDUCTION_OF[reduction]))

        return self._run(timeout_ns, body)

    # --- copies -----------------------------------------------------------------------------------------------

    def barrier(self, timeout_ns: int, is_background: bool, /) -> int:
        """Meet all ranks."""
        return self._run(timeout_ns, lambda: self._meet_as("barrier", 0, 0, -1, 0))

    def _move(
        self,
        longest: int,
        chunk: int,
        put: Callable[[int, int], None],
        take: Callable[[int, int], None],
        meet_first: Callable[[], None],
    ) -> None:
        """Put a chunk, meet, take it, for every chunk; `put` and `take` get the chunk's start and its step."""
        for start in range(0, longest, chunk) or [0]:
            step = self._step + 1
            put(start, step)
            if start == 0:
                meet_first()
            else:
                self._meet()
            take(start, step)

    def broadcast(
        self, address: int, num_bytes: int, dtype: int, root: int, timeout_ns: int, is_background: bool, /
    ) -> int:
        """Copy from the root."""
        chunk = self._slot_bytes

        def put(start: int, step: int) -> None:
            if self._rank == root:
                ctypes.memmove(self._view.slot(root, step), address + start, min(chunk, num_bytes - start))

        def take(start: int, step: int) -> None:
            if self._rank != root:
                ctypes.memmove(address + start, self._view.slot(root, step), min(chunk, num_bytes - start))

        def meet_first() -> None:
            self._meet_as("broadcast", dtype, 0, root, num_bytes)

        return self._run(timeout_ns, lambda: self._move(num_bytes, chunk, put, take, meet_first))

    def _gather(
        self, name: str, outs: tuple[int, ...] | None, sizes: Sequence[int], source: int, dtype: int, root: int
    ) -> None:
        chunk = self._slot_bytes

        def length(rank: int, start: int) -> int:
            return max(min(chunk, sizes[rank] - start), 0)

        def put(start: int, step: int) -> None:
            ctypes.memmove(self._view.slot(self._rank, step), source + start, length(self._rank, start))

        def take(start: int, step: int) -> None:
            for rank, out in enumerate(outs or ()):
                ctypes.memmove(out + start, self._view.slot(rank, step), length(rank, start))

        total = sizes[0] if name == "gather" else sum(sizes)
        self._move(max(sizes), chunk, put, take, lambda: self._meet_as(name, dtype, 0, root, total))

    def all_gather(
        self,
        outs: tuple[int, ...],
        num_bytes: tuple[int, ...],
        source: int,
        dtype: int,
        timeout_ns: int,
        is_background: bool,
        /,
    ) -> int:
        """Copy from all to all."""
        return self._run(timeout_ns, lambda: self._gather("all_gather", outs, num_bytes, source, dtype, -1))

    def gather(
        self,
        outs: tuple[int, ...] | None,
        source: int,
        num_bytes: int,
        dtype: int,
        root: int,
        timeout_ns: int,
        is_background: bool,
        /,
    ) -> int:
        """Copy from all to the root."""
        sizes = [num_bytes] * self._num_ranks
        return self._run(timeout_ns, lambda: self._gather("gather", outs, sizes, source, dtype, root))

    def scatter(
        self,
        out: int,
        sources: tuple[int, ...] | None,
        num_bytes: int,
        dtype: int,
        root: int,
        timeout_ns: int,
        is_background: bool,
        /,
    ) -> int:
        """Copy from the root, to each rank its own part: the root writes into every rank's slot."""
        chunk = self._slot_bytes

        def put(start: int, step: int) -> None:
            for rank, source in enumerate(sources or ()):
                ctypes.memmove(self._view.slot(rank, step), source + start, min(chunk, num_bytes - start))

        def take(start: int, step: int) -> None:
            ctypes.memmove(out + start, self._view.slot(self._rank, step), min(chunk, num_bytes - start))

        def meet_first() -> None:
            self._meet_as("scatter", dtype, 0, root, num_bytes)

        return self._run(timeout_ns, lambda: self._move(num_bytes, chunk, put, take, meet_first))

    def all_to_all(
        self,
        outs: tuple[int, ...],
        out_bytes: tuple[int, ...],
        sources: tuple[int, ...],
        source_bytes: tuple[int, ...],
        dtype: int,
        timeout_ns: int,
        is_background: bool,
        /,
    ) -> int:
        """Copy from each to each; the first synchronisation exchanges all sizes."""
        chunk = self._slot_bytes // self._num_ranks

        def put(start: int, step: int) -> None:
            for rank, (source, size) in enumerate(zip(sources, source_bytes, strict=True)):
                to = self._view.slot(self._rank, step) + rank * chunk
                ctypes.memmove(to, source + start, max(min(chunk, size - start), 0))

        def take(start: int, step: int) -> None:
            for rank, (out, size) in enumerate(zip(outs, out_bytes, strict=True)):
                source = self._view.slot(rank, step) + self._rank * chunk
                ctypes.memmove(out + start, source, max(min(chunk, size - start), 0))

        def body() -> None:
            self._view.write_counts((self._sequence + 1) % 2, source_bytes)
            self._meet_as("all_to_all", dtype, 0, -1, 0)
            table = self._view.counts(self._sequence % 2)
            for rank, expected in enumerate(out_bytes):
                if table[rank][self._rank] != expected:
                    raise self._mismatch(rank)
            longest = max(max(row) for row in table)
            if longest:
                self._move(longest, chunk, put, take, self._meet)

        return self._run(timeout_ns, body)

    # --- messages, and the rest of the interface --------------------------------------------------------------

    def send(
        self, order: int, address: int, num_bytes: int, peer: int, tag: int, timeout_ns: int, /
    ) -> Receipt | int | None:
        """Start a send."""
        return self._messages.send(order, address, num_bytes, peer, tag, timeout_ns)

    def receive(
        self, order: int, address: int, num_bytes: int, peer: int, tag: int, timeout_ns: int, /
    ) -> Receipt | int | None:
        """Start a receive."""
        return self._messages.receive(order, address, num_bytes, peer, tag, timeout_ns)

    def progress(self, is_background: bool, patience_ns: int, /) -> list[Receipt] | int:
        """Move messages."""
        return self._messages.progress(patience_ns)

    def join(self) -> None:
        """Mark this rank as present for the others."""
        self._view.join()

    def leave(self) -> None:
        """Mark this rank as gone for good; sleeping ranks notice within 40 ms."""
        self._view.leave()

    def poison(self, status: int, subject: int, text: str, /) -> None:
        """End the group for all; sleeping ranks notice within 40 ms."""
        self._view.poison(status, subject, text)

    def failure(self) -> tuple[int, int, int, str] | None:
        """What ended the group."""
        return self._view.failure()

    def subject(self) -> int:
        """The rank that the last failure of a call here concerns, or -1."""
        return self._subject

    def signature(self, rank: int, /) -> Signature:
        """What a rank was called with in the current collective."""
        return self._view.signature(rank, self._sequence % 2)

    def missing(self) -> list[int]:
        """The ranks that have not arrived where this rank waits."""
        return self._missing


def _share(count: int, size: int, rank: int, num_ranks: int) -> int:
    """Where a rank's part of `count` elements starts: on cache lines, so no two ranks write the same one."""
    line = max(_LINE_BYTES // size, 1)
    return min(-(-count // line) * rank // num_ranks * line, count)


def _tensor(address: int, numel: int, dtype: int) -> Tensor:
    kind = _DTYPE_OF[dtype]
    if numel == 0:
        return torch.empty(0, dtype=kind)
    return torch.frombuffer((ctypes.c_char * (numel * kind.itemsize)).from_address(address), dtype=kind)
