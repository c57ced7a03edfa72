"""Workers whose connection ended, and how long they have to come back."""

from __future__ import annotations

import threading
from collections.abc import Callable


class AbsenceTimers:
    """Calls back with a worker that was absent for too long, on a thread of its own. Any thread."""

    def __init__(self, after_s: float, on_lost: Callable[[str], None]) -> None:
        self._after_s = after_s
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._tokens: dict[str, object] = {}
        self._timers: dict[str, threading.Timer] = {}
        self._is_closed = False

    def expect(self, worker: str) -> None:
        """It must be present within the time."""
        with self._lock:
            self._start(worker)

    def present(self, worker: str) -> object:
        """It has a connection; returns what says which one."""
        with self._lock:
            self._stop(worker)
            token = self._tokens[worker] = object()
            return token

    def absent(self, worker: str, token: object) -> None:
        """A connection of the worker has ended; it may have a newer one."""
        with self._lock:
            if self._tokens.get(worker) is token:
                self._start(worker)

    def forget(self, worker: str) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self._stop(worker)
            self._tokens.pop(worker, None)

    def is_due(self, worker: str) -> bool:
        """For `on_lost`: whether it has not come back since its timer ended."""
        with self._lock:
            return self._timers.get(worker) is threading.current_thread()

    def close(self) -> None:
        """Nobody is lost any more."""
        with self._lock:
            self._is_closed = True
            for worker in list(self._timers):
                self._stop(worker)

    def _start(self, worker: str) -> None:
        self._stop(worker)
        if not self._is_closed:
            timer = self._timers[worker] = threading.Timer(self._after_s, self._on_lost, (worker,))
            timer.daemon = True
            timer.start()

    def _stop(self, worker: str) -> None:
        timer = self._timers.pop(worker, None)
        if timer is not None:
            timer.cancel()
