"""The one writer to stdout and stderr: whole lines, in order, and a paused terminal blocks nobody."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from typing import Literal, Self

StreamName = Literal["stdout", "stderr"]
_MAX_WAITING_BYTES = 1 << 20
_POLL_S = 1.0


class Terminal:
    """Writes from its own thread. A closed stream is reported once on the other stream; the job goes on."""

    def __init__(self, *, out_fd: int = 1, err_fd: int = 2) -> None:
        self._fds: dict[StreamName, int] = {"stdout": out_fd, "stderr": err_fd}
        self._broken: set[StreamName] = set()
        self._waiting: deque[tuple[StreamName, bytes]] = deque()
        self._num_waiting_bytes = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="torsh-terminal", daemon=True)
        self._thread.start()

    def write(self, name: StreamName, data: bytes) -> None:
        """Queue `data`, waiting while too much is queued: for workers' output, whose pipes then fill up."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_waiting_bytes < _MAX_WAITING_BYTES or self._is_closing)
            self._put(name, data)

    def post(self, name: StreamName, data: bytes) -> None:
        """Queue `data` without waiting: for the launcher's own messages."""
        with self._changed:
            self._put(name, data)

    @property
    def is_full(self) -> bool:
        """Whether so much is queued that `write` would wait."""
        return self._num_waiting_bytes >= _MAX_WAITING_BYTES

    def _put(self, name: StreamName, data: bytes) -> None:
        self._waiting.append((name, data))
        self._num_waiting_bytes += len(data)
        self._changed.notify_all()

    def is_tty(self, name: StreamName) -> bool:
        """Whether the stream is a terminal."""
        return os.isatty(self._fds[name])

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return
                name, data = self._waiting[0]
            self._show(name, data)
            with self._changed:
                # Removed only now, so an empty queue means that everything is written.
                self._waiting.popleft()
                self._num_waiting_bytes -= len(data)
                self._changed.notify_all()

    def _show(self, name: StreamName, data: bytes) -> None:
        fd = self._fds[name]
        while data and name not in self._broken:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                # Another process that shares the terminal made it non-blocking.
                select.select([], [fd], [], _POLL_S)
            except OSError as error:
                self._broken.add(name)
                other: StreamName = "stderr" if name == "stdout" else "stdout"
                self.post(other, f"torsh run: {name} is no longer shown: {error.strerror}\n".encode())

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Write what is queued; waits at most `timeout_s` for a reader that does not read."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(max(0.1, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
