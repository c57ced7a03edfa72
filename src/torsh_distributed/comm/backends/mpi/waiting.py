"""Waiting for MPI with a deadline and a way out.

Note on waiting. MPI's own waits have no deadline and no abort, and they keep a core busy. So nothing here blocks in
MPI: every operation is non-blocking and is polled until it is done, and MPI moves data only while it is polled. At
first, polls only yield the core in between; then they sleep, for times that grow with the time spent waiting, up to
5 ms: a rank that waits for long uses a few hundredths of a core. An abort here ends a sleep at once. When MPI has
moved data since the last sleep, polling is fast again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from torsh_distributed.comm.backends.mpi.control import ControlChannel
from torsh_distributed.comm.backends.mpi.failures import MpiFailures
from torsh_distributed.comm.backends.mpi.library import MpiLibrary
from torsh_distributed.comm.backends.wire import Call

if TYPE_CHECKING:
    from mpi4py import MPI

ASKS_PER_REST = 8
"""A poll moves only a small part of a message; yielding after each would cost a time slice per part."""
_SPIN_NS = 200_000
_SPIN_NS_PER_BYTE = 1
"""A large message is not late before it could have been moved at 1 GB/s."""
_SHORTEST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 5e-3
_SLEEP_SHARE = 0.05
"""How long to sleep, as a fraction of the time waited so far: the most that a sleep can add to it."""
_WORK_NS = 100_000
"""More processor time than this since the last sleep is not polling: MPI has moved data."""
_ANNOUNCE_NS = 200_000_000


class Pacer:
    """The pauses between two polls of MPI."""

    def __init__(self, control: ControlChannel, *, is_background: bool, num_bytes: int = 0) -> None:
        self._control = control
        # The group's own thread does not spin: the program computes meanwhile.
        self._spin_ns = 0 if is_background else _SPIN_NS + num_bytes * _SPIN_NS_PER_BYTE
        self._idle_since_ns = time.monotonic_ns()
        self._cpu_ns: int | None = None

    def rest(self) -> bool:
        """Yield the core, or sleep; whether it slept."""
        now_ns = time.monotonic_ns()
        if now_ns - self._idle_since_ns < self._spin_ns:
            os.sched_yield()
            return False
        if self._cpu_ns is not None and time.thread_time_ns() - self._cpu_ns > _WORK_NS:
            self._idle_since_ns, self._cpu_ns = now_ns, None
            return False
        share_s = (now_ns - self._idle_since_ns) * _SLEEP_SHARE / 1e9
        self._control.released.wait(min(max(share_s, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))
        self._cpu_ns = time.thread_time_ns()
        return True


class RequestWaiter:
    """RequestWaiter of one group for requests of collectives."""

    def __init__(self, library: MpiLibrary, control: ControlChannel, failures: MpiFailures) -> None:
        self._library = library
        self._control = control
        self._failures = failures

    def run(self, start: Callable[[], MPI.Request], call: Call, sequence: int, kept: Sequence[Tensor]) -> None:
        """Start an operation and wait until it is done; see `until_done`."""
        try:
            request = start()
        except self._library.mpi.Exception as error:
            raise self._failures.of_mpi(error, call) from error
        self.until_done(request, call, sequence, kept)

    def until_done(
        self, request: MPI.Request, call: Call, sequence: int, kept: Sequence[Tensor], status: MPI.Status | None = None
    ) -> None:
        """Return when `request` is done; raise when it cannot be any more, or at the call's deadline.

        `sequence` counts the group's collectives. `kept` is the memory that MPI reads and writes: after a failure
        it must never be reused, because MPI may still write to it.
        """
        try:
            if not _is_done(request, status):
                self._wait(request, call, sequence, kept, status)
        except BaseException as error:
            self._library.abandon(request, kept)
            if isinstance(error, self._library.mpi.Exception):
                raise self._failures.of_mpi(error, call) from error
            raise

    def _wait(
        self, request: MPI.Request, call: Call, sequence: int, kept: Sequence[Tensor], status: MPI.Status | None
    ) -> None:
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept)
        pacer = Pacer(self._control, is_background=call.is_background, num_bytes=num_bytes)
        started_ns = time.monotonic_ns()
        announce_ns = started_ns + min(_ANNOUNCE_NS, call.timeout_ns // 4)
        is_announced = False
        while not _is_done(request, status):
            if not pacer.rest():
                continue
            self._control.look()
            self.check(call, sequence)
            now_ns = time.monotonic_ns()
            if not is_announced and now_ns >= announce_ns:
                self._control.say_waiting(sequence)
                is_announced = True
            if now_ns >= started_ns + call.timeout_ns:
                raise self._failures.late(call, self._control.absent(sequence))

    def check(self, call: Call, sequence: int) -> None:
        """Raise if the group has ended, or a rank left that this operation needs."""
        ending = self._control.ending
        if ending is not None:
            raise self._failures.ended(call, ending.origin, ending.reason)
        gone = self._control.gone_before(sequence)
        if gone is not None:
            raise self._failures.left(call, gone)
        if self._control.released.is_set():
            raise self._failures.closed(call)


def _is_done(request: MPI.Request, status: MPI.Status | None) -> bool:
    for _ in range(ASKS_PER_REST):  # noqa: SIM110 - a generator would cost as much as the polls
        if request.Test(status):
            return True
    return False
