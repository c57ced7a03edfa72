"""The pool: one connection for each peer, made once, closed when it is idle."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from torsh_distributed.comm.transport.connection_pool import ConnectionPool


class Pipe:
    """As much of a connection as the pool asks for."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.last_used_s = 100.0
        self.num_pending = 0
        self.is_lost = False
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_threads_that_want_one_peer_at_once_share_one_connection() -> None:
    made: list[Pipe] = []
    together = threading.Barrier(4)

    def connect(peer: str) -> Pipe:
        made.append(Pipe(peer))
        return made[-1]

    pool = ConnectionPool(connect, keep_alive_s=10)

    def get() -> Pipe:
        together.wait(10)
        return pool.get("a")

    with ThreadPoolExecutor(4) as threads:
        found = {id(future.result(10)) for future in [threads.submit(get) for _ in range(4)]}
    assert len(found) == len(made) == 1
    assert pool.get("b") is not made[0]
    assert pool.stats().peers == ("a", "b")


def test_idle_and_lost_ones_are_closed_and_busy_ones_are_kept() -> None:
    pool = ConnectionPool(Pipe, keep_alive_s=10)
    idle, busy, lost, fresh = (pool.get(name) for name in ("idle", "busy", "lost", "fresh"))
    busy.num_pending, lost.is_lost, fresh.last_used_s = 1, True, 108.0
    pool.close_idle(now_s=111.0)
    assert [one.is_closed for one in (idle, busy, lost, fresh)] == [True, False, True, False]
    assert pool.stats() == (2, 1, 1, 1, ("busy", "fresh"))


def test_a_lost_connection_is_made_again_and_a_closed_pool_makes_none() -> None:
    pool = ConnectionPool(Pipe, keep_alive_s=10)
    first = pool.get("a")
    first.is_lost = True
    second = pool.get("a")
    assert second is not first
    pool.close()
    assert second.is_closed
    with pytest.raises(ConnectionResetError):
        pool.get("a")
