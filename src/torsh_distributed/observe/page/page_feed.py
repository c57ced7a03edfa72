"""The state of a job as JSON, made at most once a second however many look at it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

MakeState = Callable[[], dict[str, Any]]


class PageFeed:
    """Encodes the state for all viewers together. `live` yields it for server-sent events until `closing` is set."""

    def __init__(self, make_state: MakeState, *, interval_s: float = 1.0, max_viewers: int = 32) -> None:
        self._make_state = make_state
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._encoded = b""
        self._made_s = -1e9
        self._room = threading.BoundedSemaphore(max_viewers)
        self.closing = threading.Event()

    def state(self) -> bytes:
        """The newest state, at most `interval_s` old."""
        with self._lock:
            if time.monotonic() - self._made_s >= self._interval_s:
                self._encoded = json.dumps(self._make_state(), default=str, allow_nan=False).encode()
                self._made_s = time.monotonic()
            return self._encoded

    def live(self) -> Iterator[bytes] | None:
        """Messages for an EventSource, one a second; None if too many look already."""
        if not self._room.acquire(blocking=False):
            return None
        return self._stream()

    def _stream(self) -> Iterator[bytes]:
        try:
            yield b"retry: 2000\n\n"
            while True:
                yield b"data: " + self.state() + b"\n\n"
                if self.closing.wait(self._interval_s):
                    yield b"data: " + self._last() + b"\n\n"
                    return
        finally:
            self._room.release()

    def _last(self) -> bytes:
        self._made_s = -1e9
        return self.state()
