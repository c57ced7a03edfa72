"""Polls MPI for the sends and receives of one group and completes their works.

A message may be done when the call returns. For the others, a thread that waits for one polls MPI for all of them;
while none waits, the group's own thread does, at a slow pace, so messages flow while the program computes and a work
that is never waited for still ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from torsh_distributed.comm.backends.handles import PendingWork
from torsh_distributed.comm.backends.mpi.control import ControlChannel
from torsh_distributed.comm.backends.mpi.datatypes import MpiDatatypes
from torsh_distributed.comm.backends.mpi.failures import MpiFailures
from torsh_distributed.comm.backends.mpi.library import MpiLibrary
from torsh_distributed.comm.backends.mpi.waiting import ASKS_PER_REST, Pacer
from torsh_distributed.comm.backends.wire import Call
from torsh_distributed.errors import TorshError

if TYPE_CHECKING:
    from mpi4py import MPI

_CLOSE_TIMEOUT_S = 5.0
_LAST_MESSAGES_S = 1.0
"""How long messages of a rank that left may still be in transit."""


@dataclass(slots=True)
class _Transfer:
    request: MPI.Request
    buffer: Tensor  # kept alive until the transfer is done
    work: PendingWork
    call: Call
    peer: int | None
    is_receive: bool
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    transfer: _Transfer
    error: TorshError | None
    peer: int = -1


class Transfers:
    """Pending sends and receives of one rank."""

    def __init__(
        self,
        library: MpiLibrary,
        comm: MPI.Intracomm,
        datatypes: MpiDatatypes,
        control: ControlChannel,
        failures: MpiFailures,
        *,
        max_tag: int,
    ) -> None:
        self._library = library
        self._comm = comm
        self._datatypes = datatypes
        self._control = control
        self._failures = failures
        self._max_tag = max_tag
        self._pending: list[_Transfer] = []
        # MPI forbids two threads to test one request at the same time.
        self._turn = threading.Lock()
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def send(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        """Start a send."""
        self._check_tag(tag, call)
        request = self._start(partial(self._comm.Isend, self._datatypes.raw(buffer), peer, tag), call)
        self._add(_Transfer(request, buffer, work, call, peer, False, time.monotonic_ns() + call.timeout_ns))

    def receive(self, buffer: Tensor, peer: int | None, tag: int, work: PendingWork, call: Call) -> None:
        """Start a receive."""
        self._check_tag(tag, call)
        source = self._library.mpi.ANY_SOURCE if peer is None else peer
        request = self._start(partial(self._comm.Irecv, self._datatypes.raw(buffer), source, tag), call)
        self._add(_Transfer(request, buffer, work, call, peer, True, time.monotonic_ns() + call.timeout_ns))

    def _start(self, start: Callable[[], MPI.Request], call: Call) -> MPI.Request:
        try:
            return start()
        except self._library.mpi.Exception as error:
            raise self._failures.of_mpi(error, call) from error

    def _check_tag(self, tag: int, call: Call) -> None:
        if not 0 <= tag <= self._max_tag:
            raise self._failures.reserved_tag(call, tag, self._max_tag)

    def _add(self, transfer: _Transfer) -> None:
        with self._turn:
            outcome = self._look_at(transfer)
            if outcome is None:
                self._pending.append(transfer)
        if outcome is not None:
            transfer.work.complete(outcome.error, peer=outcome.peer)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="torsh-mpi-transfers", daemon=True)
            self._thread.start()
        if not self._wanted.is_set():
            self._wanted.set()

    def _look_at(self, transfer: _Transfer) -> _Outcome | None:
        """How a transfer ended, or None while it is pending. The caller holds the turn."""
        status = self._library.mpi.Status()
        try:
            if not transfer.request.Test(status):
                return self._give_up(transfer)
        except self._library.mpi.Exception as error:
            return _Outcome(transfer, self._failures.of_mpi(error, transfer.call))
        if not transfer.is_receive:
            return _Outcome(transfer, None, peer=-1 if transfer.peer is None else transfer.peer)
        origin, received = status.Get_source(), status.Get_elements(self._library.mpi.BYTE)
        expected = transfer.buffer.numel() * transfer.buffer.element_size()
        if received != expected:
            return _Outcome(transfer, self._failures.other_size(transfer.call, origin, received, expected))
        return _Outcome(transfer, None, peer=origin)

    def _give_up(self, transfer: _Transfer) -> _Outcome | None:
        """The error of a transfer that cannot complete any more; it is cancelled if MPI can."""
        error: TorshError | None = None
        ending = self._control.ending
        if ending is not None:
            error = self._failures.ended(transfer.call, ending.origin, ending.reason)
        elif self._is_closed:
            error = self._failures.closed(transfer.call)
        elif (gone := self._control.gone_for(transfer.peer, _LAST_MESSAGES_S)) is not None:
            error = self._failures.left(transfer.call, gone)
        elif time.monotonic_ns() >= transfer.deadline_ns:
            error = self._failures.late(transfer.call, [] if transfer.peer is None else [transfer.peer])
        if error is None:
            return None
        if transfer.is_receive:
            transfer.request.Cancel()
        if not transfer.request.Test():
            self._library.abandon(transfer.request, transfer.buffer)
        return _Outcome(transfer, error)

    def _look(self) -> None:
        """Test every pending transfer and complete the works of those that ended."""
        with self._turn:
            outcomes = [outcome for transfer in self._pending if (outcome := self._look_at(transfer)) is not None]
            ended = {id(outcome.transfer) for outcome in outcomes}
            self._pending = [transfer for transfer in self._pending if id(transfer) not in ended]
        for outcome in outcomes:
            outcome.transfer.work.complete(outcome.error, peer=outcome.peer)

    def help_with(self, work: PendingWork, timeout_s: float | None) -> None:
        """Poll MPI until `work` is complete or the time is over."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pacer = Pacer(self._control, is_background=False)
        while not work.is_completed() and (deadline is None or time.monotonic() < deadline):
            for _ in range(ASKS_PER_REST):
                self._look()
                if work.is_completed():
                    return
            if pacer.rest():
                self._control.look()

    def _serve(self) -> None:
        while not self._is_closed:
            self._wanted.wait()
            pacer = Pacer(self._control, is_background=True)
            # Rest first: most callers wait for their transfer right away.
            while self._pending and not self._is_closed:
                pacer.rest()
                self._control.look()
                self._look()
            self._wanted.clear()
            if self._pending or self._is_closed:
                self._wanted.set()

    def close(self) -> None:
        """End the thread and every pending transfer."""
        self._is_closed = True
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)
        self._look()
