"""The launcher's event loop: file descriptors and timers in one thread, so no state needs a lock."""

from __future__ import annotations

import heapq
import itertools
import selectors
import time
from collections.abc import Callable
from typing import Self

Callback = Callable[[], None]


class Timer:
    """A call at a later time, once."""

    def __init__(self, callback: Callback) -> None:
        self._callback: Callback | None = callback

    def cancel(self) -> None:
        """Do not call; cancelling twice, or after the call, does nothing."""
        self._callback = None

    def fire(self) -> None:
        """Call, unless cancelled or already called."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Loop:
    """Waits for descriptors and deadlines, and calls back. `run` returns what `stop` was given."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._result: int | None = None

    def watch(self, fd: int, callback: Callback, *, writable: bool = False) -> None:
        """Call back while `fd` is readable, or with `writable` while it can be read or written; replaces a watch."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writable else 0)
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, callback)
        else:
            self._selector.register(fd, events, callback)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`; call this before closing it."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        """Call back once, `delay_s` seconds from now."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), timer))
        return timer

    def stop(self, result: int) -> None:
        """Make `run` return; the first result counts."""
        if self._result is None:
            self._result = result

    def run(self) -> int:
        """Run until `stop`. Timers that are due fire before descriptors that became ready at the same time."""
        while self._result is None:
            timeout_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            ready = self._selector.select(timeout_s)
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2].fire()
            for key, _ in ready:
                # An earlier callback of this round may have removed this descriptor.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
        return self._result

    def close(self) -> None:
        """Stop watching everything."""
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
