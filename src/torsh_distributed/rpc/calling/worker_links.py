"""The links of a worker to those that it calls: made when they are first needed, looked at when they were idle."""

from __future__ import annotations

import time

from torsh_distributed.comm.transport.connection_pool import ConnectionPool, ConnectionPoolStats
from torsh_distributed.comm.transport.event_loop import EventLoop
from torsh_distributed.rpc.calling.connecting import open_lanes
from torsh_distributed.rpc.calling.link import Link
from torsh_distributed.rpc.directory import WorkerDirectory
from torsh_distributed.rpc.messages.encoding import ValueRegistry

_KEEP_ALIVE_S = 300.0
_CHECK_IDLE_S = 1.0
"""A link that was not used for so long is looked at before it is used: its peer may have been started again."""


class WorkerLinks:
    """One link for each worker that is called, by name. Any thread."""

    def __init__(
        self,
        caller: str,
        directory: WorkerDirectory,
        secret: bytes,
        *,
        loop: EventLoop,
        registry: ValueRegistry,
        most_payload_bytes: int,
    ) -> None:
        self._caller = caller
        self._directory = directory
        self._secret = secret
        self._loop = loop
        self._registry = registry
        self._most_payload_bytes = most_payload_bytes
        self._pool: ConnectionPool[Link] = ConnectionPool(self.connect, keep_alive_s=_KEEP_ALIVE_S)

    def connect(self, name: str) -> Link:
        """A link of the caller's own."""
        callee = self._directory.find(name)
        pair = open_lanes(callee, self._secret, self._caller, self._loop, most_payload_bytes=self._most_payload_bytes)
        return Link(name, pair, self._registry)

    def to(self, name: str) -> Link:
        """The link to a worker."""
        link = self._pool.get(name)
        if time.monotonic() - link.last_used_s > _CHECK_IDLE_S:
            link.poll()
            link = self._pool.get(name)
        return link

    def settle_all(self) -> None:
        """Until all calls have ended, in whatever way."""
        for link in self._pool.connections():
            link.settle_all()

    def drop_idle(self) -> None:
        """Forget connections that nobody uses, and memory that large payloads went through some time ago."""
        self._pool.close_idle()
        for link in self._pool.connections():
            link.drop_idle()

    def stats(self) -> ConnectionPoolStats:
        """As of now."""
        return self._pool.stats()

    def close(self) -> None:
        """Calls under way fail."""
        self._pool.close()
