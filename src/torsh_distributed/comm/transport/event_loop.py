"""A thread that waits for many sockets and for moments in time, and calls back."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0
_LONGEST_WAIT_S = 1e6
"""What epoll takes."""


class EventLoop:
    """Calls back on its own thread, which starts with the first thing to wait for. Callbacks must not block.

    All methods may be called from any thread. A callback that raises is logged, and the loop goes on.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_current(self) -> bool:
        """Whether this is the loop's own thread."""
        return threading.current_thread() is self._thread

    def watch(self, fd: int, mask: int, handler: Callable[[int], None]) -> None:
        """Call `handler` with the events of `mask` that a descriptor has; with mask 0 no more.

        Afterwards at most one call that has begun already may come: handlers read without waiting.
        """
        with self._lock:
            if self._is_closed:
                return
            if not mask:
                if self._handlers.pop(fd, None) is not None:
                    self._epoll.unregister(fd)
            elif fd in self._handlers:
                self._handlers[fd] = handler
                self._epoll.modify(fd, mask)
            else:
                self._handlers[fd] = handler
                self._epoll.register(fd, mask)
            if mask:
                self._start()

    def call_at(self, moment_s: float, callback: Callable[[], None]) -> None:
        """Call back at a moment of the monotonic clock."""
        with self._lock:
            if self._is_closed:
                return
            heapq.heappush(self._timers, (moment_s, next(self._order), callback))
            self._start()
            if self._timers[0][0] == moment_s:
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """End the thread. Sockets stay open; callbacks that have begun end first, unless this is one of them."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            thread = self._thread
            os.eventfd_write(self._wakeup, 1)
        if thread is None:
            self._release()
        elif not self.is_current:
            thread.join(_CLOSE_S)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            for fd, mask in self._epoll.poll(self._next_timeout_s()):
                handler = self._handlers.get(fd)
                if handler is not None:
                    try:
                        handler(mask)
                    except Exception:
                        _log.exception("a callback of %s failed", self._name)
                elif fd == self._wakeup:
                    os.eventfd_read(self._wakeup)
        self._release()

    def _next_timeout_s(self) -> float | None:
        """Call what is due, and return the time to the next moment."""
        while self._timers:
            with self._lock:
                wait_s = self._timers[0][0] - time.monotonic()
                if wait_s > 0:
                    return min(wait_s, _LONGEST_WAIT_S)
                callback = heapq.heappop(self._timers)[2]
            try:
                callback()
            except Exception:
                _log.exception("a timer of %s failed", self._name)
        return None

    def _release(self) -> None:
        with self._lock:
            self._epoll.close()
            os.close(self._wakeup)
            self._handlers.clear()
            self._timers.clear()
