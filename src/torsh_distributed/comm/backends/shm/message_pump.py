"""Moves the sends and receives of one group and completes their works.

A message that can be moved at once is done when the call returns. For the others some thread has to call the core's
`progress`: one that waits for a message, or else the group's own thread, so messages flow while the program computes.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from queue import SimpleQueue

from torch import Tensor

from torsh_distributed.comm.backends.handles import PendingWork
from torsh_distributed.comm.backends.shm.codes import Status
from torsh_distributed.comm.backends.shm.core import Core, Receipt
from torsh_distributed.comm.backends.shm.failures import ShmFailures
from torsh_distributed.comm.backends.wire import Call

# `progress` returns when a message is done; this only bounds how long it stays when nothing happens.
_PATIENCE_NS = 1_000_000_000


@dataclass(slots=True)
class _PendingOrder:
    work: PendingWork
    buffer: Tensor  # kept alive until the message is done
    call: Call
    peer: int


class MessagePump:
    """Pending sends and receives of one rank, and the thread that moves them when no other thread waits."""

    def __init__(self, core: Core, failures: ShmFailures) -> None:
        self._core = core
        self._failures = failures
        self._orders: dict[int, _PendingOrder] = {}
        self._numbers = itertools.count(1)
        self._turn = threading.Lock()
        self._calls: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def send(self, buffer: Tensor, peer: int, tag: int, work: PendingWork, call: Call) -> None:
        """Start a send."""
        number = self._new_order(buffer, peer, work, call)
        num_bytes = buffer.numel() * buffer.element_size()
        self._settle(number, self._core.send(number, buffer.data_ptr(), num_bytes, peer, tag, call.timeout_ns))

    def receive(self, buffer: Tensor, peer: int | None, tag: int, work: PendingWork, call: Call) -> None:
        """Start a receive."""
        source = -1 if peer is None else peer
        number = self._new_order(buffer, source, work, call)
        num_bytes = buffer.numel() * buffer.element_size()
        self._settle(number, self._core.receive(number, buffer.data_ptr(), num_bytes, source, tag, call.timeout_ns))

    def _new_order(self, buffer: Tensor, peer: int, work: PendingWork, call: Call) -> int:
        number = next(self._numbers)
        self._orders[number] = _PendingOrder(work, buffer, call, peer)
        return number

    def _settle(self, number: int, outcome: Receipt | int | None) -> None:
        """After a start: the message is done, it failed, or a thread has to move it."""
        if isinstance(outcome, tuple):
            self._deliver(outcome)
        elif outcome is not None:
            self._core.poison(-outcome, self._orders[number].peer, "")
            with self._turn:  # no thread uses these tensors in the core any more
                self._fail_all(-outcome)
        else:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="torsh-shm-messages", daemon=True)
                self._thread.start()
            self._calls.put(None)

    def _deliver(self, receipt: Receipt) -> None:
        number, status, peer, num_bytes = receipt
        order = self._orders.pop(number, None)
        if order is None:
            return  # failed with the group in the meantime
        if status == Status.OK:
            order.work.complete(peer=peer)
        else:
            size = num_bytes if status == Status.MISMATCH else None
            order.work.complete(self._failures.error(status, order.call, subject=peer, num_bytes=size))

    def _fail_all(self, status: int) -> None:
        """End every pending message with the reason why the group failed."""
        while self._orders:
            _, order = self._orders.popitem()
            failure = self._core.failure()
            subject = failure[2] if failure is not None else order.peer
            order.work.complete(self._failures.error(status, order.call, subject=subject))

    def _move(self, *, is_background: bool, patience_ns: int) -> None:
        outcome = self._core.progress(is_background, patience_ns)
        if isinstance(outcome, int):
            self._fail_all(-outcome)
        else:
            for receipt in outcome:
                self._deliver(receipt)

    def help_with(self, work: PendingWork, timeout_s: float | None) -> None:
        """Move messages in the waiting thread, unless another one does already."""
        patience_ns = _PATIENCE_NS if timeout_s is None else int(timeout_s * 1e9)
        while not work.is_completed():
            if not self._turn.acquire(blocking=False):
                work.wait_for_completion(timeout_s)
                return
            try:
                if not work.is_completed():
                    self._move(is_background=False, patience_ns=patience_ns)
            finally:
                self._turn.release()
            if timeout_s is not None:
                return

    def _serve(self) -> None:
        while not self._is_closed:
            self._calls.get()
            while self._orders and not self._is_closed:
                with self._turn:
                    if self._orders:
                        self._move(is_background=True, patience_ns=_PATIENCE_NS)

    def close(self, timeout_s: float) -> None:
        """End the thread; the core has left the group, so no thread sleeps in it."""
        self._is_closed = True
        self._calls.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        self._fail_all(Status.LEFT)
