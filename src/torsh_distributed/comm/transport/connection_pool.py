"""Connections that are kept: one for each peer, made when it is first needed, closed when it is idle for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar


class PooledConnection(Protocol):
    """What the pool asks of a connection."""

    last_used_s: float
    """On the monotonic clock."""

    @property
    def is_lost(self) -> bool:
        """Whether the other end is gone."""

    @property
    def num_pending(self) -> int:
        """Messages that wait for an answer: it is not idle."""

    def close(self) -> None:
        """Close it."""


P = TypeVar("P", bound=PooledConnection)


class ConnectionPoolStats(NamedTuple):
    """What a pool holds, and what it has closed since it began."""

    num_connections: int
    num_active: int
    """With messages that wait for an answer."""
    num_expired: int
    """Closed because they were idle."""
    num_lost: int
    """Whose other end was gone."""
    peers: tuple[str, ...]


class ConnectionPool(Generic[P]):
    """`get` from any thread; threads that want the same peer at once share one attempt to connect."""

    def __init__(self, connect: Callable[[str], P], *, keep_alive_s: float) -> None:
        self._connect = connect
        self._keep_alive_s = keep_alive_s
        self._lock = threading.Lock()
        self._connections: dict[str, P] = {}
        self._connecting: dict[str, threading.Lock] = {}
        self._num_expired = self._num_lost = 0
        self._is_closed = False

    def get(self, peer: str) -> P:
        """A connection that is not known to be lost; raises what connecting raises."""
        found = self._connections.get(peer)
        if found is not None and not found.is_lost:
            return found
        with self._lock:
            turn = self._connecting.setdefault(peer, threading.Lock())
        with turn:
            found = self._connections.get(peer)
            if found is not None and not found.is_lost:
                return found
            made = self._connect(peer)
            with self._lock:
                self._num_lost += found is not None
                if not self._is_closed:
                    self._connections[peer] = made
                    return made
        made.close()
        raise ConnectionResetError("the pool is closed")

    def close_idle(self, now_s: float | None = None) -> None:
        """Close what was not used for long, and forget what is lost."""
        now_s = time.monotonic() if now_s is None else now_s
        with self._lock:
            for peer, connection in list(self._connections.items()):
                is_idle = not connection.num_pending and now_s - connection.last_used_s > self._keep_alive_s
                if connection.is_lost or is_idle:
                    del self._connections[peer]
                    self._num_lost += connection.is_lost
                    self._num_expired += not connection.is_lost
                    connection.close()

    def connections(self) -> list[P]:
        """Those that are there."""
        with self._lock:
            return list(self._connections.values())

    def stats(self) -> ConnectionPoolStats:
        """As of now."""
        with self._lock:
            connections = self._connections
            return ConnectionPoolStats(
                num_connections=len(connections),
                num_active=sum(bool(one.num_pending) for one in connections.values()),
                num_expired=self._num_expired,
                num_lost=self._num_lost,
                peers=tuple(connections),
            )

    def close(self) -> None:
        """Close all."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            connection.close()
