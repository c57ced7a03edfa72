"""One daemon thread that runs callables one after the other."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from torsh_distributed.errors import CommunicationError, OperationTimeout

P = ParamSpec("P")
R = TypeVar("R")

_EXIT_S = 5.0


class SerialThread:
    """Runs callables on a thread of its own, in the order of submission.

    The thread starts with the first callable and ends after the last one when this is closed or no longer referenced.
    A forked child starts a thread of its own; what the parent submitted stays in the parent. At interpreter exit the
    thread gets a few seconds to finish, because one that is caught inside torch then crashes the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_closed = False
        self._begin()
        _threads.add(self)

    def _begin(self) -> None:
        """A state without a thread."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # The thread holds the queue alone, so it does not keep this object alive.
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._finalizer = weakref.finalize(self, self._queue.put, None)
        self._finalizer.atexit = False

    def submit(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run `call` after everything submitted before it; the future gets its result or what it raised."""
        future: Future[R] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call(*args, **kwargs)
            except BaseException as error:  # raised where the future is waited for
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._is_closed:
                raise CommunicationError(f"the thread {self._name} was closed", hint="make a new one")
            if self._thread is None:
                self._thread = threading.Thread(target=_serve, args=(self._queue,), name=self._name, daemon=True)
                self._thread.start()
            self._queue.put(job)
        return future

    def stop(self) -> None:
        """Accept nothing further and end the thread after what was submitted; does not wait."""
        with self._lock:
            self._is_closed = True
        # Not by calling the finalizer: at interpreter exit it may do nothing any more, and the thread would wait on.
        if self._finalizer.detach() is not None:
            self._queue.put(None)

    def close(self, timeout_s: float) -> None:
        """`stop`, then wait for the end; OperationTimeout after `timeout_s`."""
        self.stop()
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise OperationTimeout(
                f"the thread {self._name} did not end within {timeout_s:g} s",
                hint="what it runs hangs: its own error says why, once its deadline has passed",
                operation=self._name,
            )


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := queue.get()) is not None:
        job()
        del job  # hold nothing while waiting: the last reference to the submitter must not be here


_threads: weakref.WeakSet[SerialThread] = weakref.WeakSet()


@atexit.register
def _finish_at_exit() -> None:
    deadline_s = time.monotonic() + _EXIT_S
    running = [one._thread for one in _threads if one._thread is not None]
    for one in list(_threads):
        one.stop()
    for thread in running:
        thread.join(max(0.0, deadline_s - time.monotonic()))


def _begin_in_child() -> None:
    for one in list(_threads):
        one._finalizer.detach()
        one._begin()


os.register_at_fork(after_in_child=_begin_in_child)
