"""Beats in both directions of one connection: who is silent for too long is given up, and may come again.

A connection says "alive" when it has waited for `beat_s`; anything that arrives shows that the other end lives. A
message of many bytes need not arrive at once: each of its slices has `expire_s`, so a device that falls asleep in
mid-upload is noticed by what does not come.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torsh_distributed.comm.transport.connection import Connection
from torsh_distributed.errors import ConfigurationError

_ALIVE = ["alive"]
_SLICE_BYTES = 1 << 18
_FEWEST_MEASURED_BYTES = 1 << 16
"""A message of fewer bytes arrives at once, and says nothing of a link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatSettings:
    """Of a server and all its devices, which learn them from it."""

    beat_s: float = 10.0
    """After so long a wait each end tells the other that it is there."""

    expire_s: float = 60.0
    """An end that was silent for so long is given up."""

    def __post_init__(self) -> None:
        if not 0 < 2 * self.beat_s <= self.expire_s:
            raise ConfigurationError(
                "a device must have time for two beats before it expires",
                hint=f"lower beat_s (--heartbeat-s) to {self.expire_s / 2:g} or less, or raise expire_s (--expire-s)",
                beat_s=self.beat_s,
                expire_s=self.expire_s,
            )


class DeviceHeartbeat:
    """Of one connection, for the one thread that sends and receives on it. Errors are OSError."""

    def __init__(self, connection: Connection, settings: HeartbeatSettings) -> None:
        self._connection = connection
        self._settings = settings
        connection.limit(settings.expire_s)
        self._poller = select.poll()
        self._poller.register(connection.fileno(), select.POLLIN)
        self._said_s = self._heard_s = time.monotonic()
        self.bytes_per_s: float | None = None
        """Of the last long message that came; None: there was none."""

    def send(self, head: Any, payload: bytes = b"") -> None:
        """Send a message; TimeoutError if a slice of it does not go in time."""
        view = memoryview(payload)
        self._connection.send(head, *(view[at : at + _SLICE_BYTES] for at in range(0, len(view), _SLICE_BYTES)))
        self._said_s = time.monotonic()

    def receive(self, wakeup: int = -1) -> tuple[Any, memoryview] | None:
        """The next message, whenever it comes; None as soon as the file descriptor `wakeup` can be read."""
        if wakeup >= 0:
            self._poller.register(wakeup, select.POLLIN)
        while True:
            now_s = time.monotonic()
            wait_s = min(self._said_s + self._settings.beat_s, self._heard_s + self._settings.expire_s) - now_s
            ready = {fd for fd, _ in self._poller.poll(max(0.0, 1000 * wait_s))}
            if self._connection.fileno() in ready:  # before the clock: this process may have slept, too
                message = self._read()
                if message[0] != _ALIVE:
                    return message
            elif wakeup in ready:
                return None
            elif time.monotonic() >= self._heard_s + self._settings.expire_s:
                raise TimeoutError(self.silence())
            if time.monotonic() >= self._said_s + self._settings.beat_s:
                self.send(_ALIVE)

    def silence(self) -> str:
        """What is said of an end that was given up."""
        return f"it was silent for {self._settings.expire_s:g} s"

    def _read(self) -> tuple[Any, memoryview]:
        began_s = 0.0

        def place(head: Any, num_bytes: int) -> memoryview:
            nonlocal began_s
            began_s = time.monotonic()
            return memoryview(bytearray(num_bytes))

        head, payload = self._connection.receive(place)
        self._heard_s = time.monotonic()
        if len(payload) >= _FEWEST_MEASURED_BYTES:
            self.bytes_per_s = len(payload) / max(self._heard_s - began_s, 1e-6)
        return head, payload

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """While open, a thread says that this end is alive; nothing else may use the connection."""
        is_over = threading.Event()

        def beat() -> None:
            with contextlib.suppress(OSError):  # the next message meets it, too
                while not is_over.wait(self._settings.beat_s):
                    self.send(_ALIVE)

        thread = threading.Thread(target=beat, name="federated-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            # Only now does this thread listen again: what came meanwhile waits, and silence counts from here.
            self._heard_s = time.monotonic()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
