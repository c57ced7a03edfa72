"""Runs the collectives of one group in order: now in the caller's thread, or later in the group's own.

Why not just a thread with a queue: a hop to another thread costs tens of microseconds, a small collective one. A
caller that wants its result now runs the work itself. A caller that asked for `async_op` leaves it to the group's
thread; if it waits before that thread has started, it runs the work itself. Collectives always run in the order of the
calls, as the other ranks expect.

Threads: those that call collectives, which take turns with each other as on every rank; the group's own, started with
the first `submit`; those that wait for a work. Whoever runs a body holds `_turn`. Tasks are appended without it and
leave the queue only under it, so a queue found empty under the turn means that all before is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from torsh_distributed.comm.backends.handles import PendingWork
from torsh_distributed.comm.backends.wire import Call

Body = Callable[[Call], None]


class OrderedBody(Protocol):
    """A body that depends on where its caller stands, such as on a stream of a GPU: run there at once, or later."""

    def __call__(self, call: Call) -> None:
        """Run it in the caller's thread, before the caller goes on."""

    def later(self) -> Body:
        """The same for any thread and moment; asked for where the caller stands."""


class OneByOne:
    """Several bodies as one."""

    def __init__(self, bodies: Sequence[Body]) -> None:
        self._bodies = bodies

    def __call__(self, call: Call) -> None:
        """Run them in order."""
        for body in self._bodies:
            body(call)

    def later(self) -> Body:
        """All of them for any thread."""
        return OneByOne([for_any_thread(body) for body in self._bodies])


def for_any_thread(body: Body) -> Body:
    """The body, as it may be run after its caller has gone on."""
    later: Callable[[], Body] | None = getattr(body, "later", None)
    return body if later is None else later()


class _Task:
    __slots__ = ("body", "call", "work")

    def __init__(self, body: Body, call: Call, work: PendingWork) -> None:
        self.body = body
        self.call = call
        self.work = work


class OrderedExecutor:
    """Runs bodies one at a time, in the order they came."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: deque[_Task] = deque()
        self._turn = threading.Lock()
        # One word for each task: the group's thread comes for whatever waiters have left.
        self._calls: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # The last body is done and its waiters are being notified: the turn is still held, but nothing runs.
        self._is_finishing = False
        self.end = self._turn.release  # gives the turn back; bound once, because every collective calls it

    @property
    def is_busy(self) -> bool:
        """Whether a body is running or waits for its turn."""
        return bool(self._tasks) or (self._turn.locked() and not self._is_finishing)

    def begin(self) -> bool:
        """Take the turn if nothing runs or waits; the caller then runs one collective and calls `end`."""
        if self._tasks or not self._turn.acquire(False):
            return False
        if self._tasks:  # queued since the look above: it came first
            self._turn.release()
            return False
        self._is_finishing = False
        return True

    def run(self, body: Body, call: Call) -> bool:
        """Run `body` now, in this thread, if nothing is before it; whether it was run."""
        if not self.begin():
            return False
        try:
            body(call)
            return True
        finally:
            self.end()

    def submit(self, body: Body, call: Call, work: PendingWork) -> None:
        """Run `body` after all that came before, and complete `work` with its outcome."""
        self._tasks.append(_Task(body, call, work))  # before the word: the thread goes back to sleep if it finds none
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put(None)

    def help_with(self, work: PendingWork, timeout_s: float | None) -> None:
        """Run tasks until `work` is complete, or sleep while another thread does.

        With a time limit this thread only sleeps: once it runs a collective it cannot leave it.
        """
        while timeout_s is None and not work.is_completed() and self._turn.acquire(blocking=False):
            try:
                while self._tasks and not work.is_completed():
                    self._run_first(is_background=False)
            finally:
                self._turn.release()
            if not self._tasks:
                break
        # Another thread has the turn, and runs this work or one before it; the group's thread comes for the rest.
        if not work.is_completed():
            work.wait_for_completion(timeout_s)

    def _run_first(self, *, is_background: bool) -> None:
        task = self._tasks.popleft()
        task.call.is_background = is_background
        self._is_finishing = False
        error: BaseException | None = None
        try:
            task.body(task.call)
        except BaseException as raised:  # it is raised where the work is waited for, not in this thread
            error = raised
        # Before `complete`: a waiter that it releases may close the group at once, and must not find it busy.
        self._is_finishing = not self._tasks  # until the next one begins
        task.work.complete(error)
        if isinstance(error, KeyboardInterrupt) and not is_background:
            raise error

    def _serve(self) -> None:
        while True:
            self._calls.get()
            if not self._tasks:  # a waiter did the work itself
                if self._is_closed:
                    return
                continue
            with self._turn:
                if self._tasks:
                    self._run_first(is_background=True)

    def close(self, timeout_s: float) -> bool:
        """End the group's thread after what is queued; whether it ended in time."""
        self._is_closed = True  # before the word, which ends the thread once nothing is queued
        self._calls.put(None)
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()
