"""A device that is connected: what there is to say to it, and what it says."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import Any

from torsh_distributed.comm.transport.connection import Connection
from torsh_distributed.federated.deployment.device_heartbeat import DeviceHeartbeat, HeartbeatSettings


class ConnectedDevice:
    """One thread sends and receives: TLS does not promise more."""

    def __init__(
        self, name: str, public: bytes, connection: Connection, settings: HeartbeatSettings, *, is_metered: bool
    ) -> None:
        self.name = name
        self.public = public
        self.connection = connection
        self.heartbeat = DeviceHeartbeat(connection, settings)
        self.is_metered = is_metered
        self.asked_s = 0.0
        """When it got its work."""
        self.nonce = b""
        """Of the work it has; empty: none."""
        self._outbox: deque[tuple[list[Any], bytes]] = deque()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC)

    def say(self, head: list[Any], payload: bytes = b"") -> None:
        """From any thread: have a message sent, with the server's lock held."""
        if self._wakeup >= 0:
            self._outbox.append((head, payload))
            os.eventfd_write(self._wakeup, 1)

    def replies(self) -> Iterator[tuple[Any, memoryview]]:
        """What the device says; in between, what there is to say is sent.

        OSError when the device hangs up or is silent for too long. It hangs up when it has read the end, which may be
        after an update that nobody waits for any more.
        """
        while True:
            reply = self.heartbeat.receive(self._wakeup)
            if reply is not None:
                yield reply
                continue
            os.eventfd_read(self._wakeup)
            while self._outbox:
                self.heartbeat.send(*self._outbox.popleft())

    def close(self) -> None:
        """With the server's lock held."""
        os.close(self._wakeup)
        self._wakeup = -1
