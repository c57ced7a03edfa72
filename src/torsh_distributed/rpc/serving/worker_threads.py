"""The threads that run calls: a bounded number, started when they are needed."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

_log = logging.getLogger(__name__)


class WorkerThreads:
    """Runs callables on up to `num_threads` threads; they are daemons, since a call that hangs must not keep us."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_free = 0
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run it when a thread is free; dropped once closed. It must not raise."""
        with self._lock:
            if self._is_closed:
                return
            if self._num_free > 0:
                self._num_free -= 1
            elif len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("a call failed outside of its function")
            with self._lock:
                if self._jobs.empty():
                    self._num_free += 1

    def close(self, timeout_s: float) -> None:
        """Let calls that run end within the time; what waits is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(Empty):
                while True:
                    self._jobs.get_nowait()
            for _ in self._threads:
                self._jobs.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
