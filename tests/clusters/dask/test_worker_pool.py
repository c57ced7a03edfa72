from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from torsh_distributed.clusters.dask.worker_pool import DaskPool
from torsh_distributed.clusters.hosted.rank_host import RoomFound


class StartingCluster:
    """A client of a cluster whose only worker has registered, and takes tasks a few looks later, without an event."""

    def __init__(self, ready_at: int = 3) -> None:
        self.num_looks, self.ready_at = 0, ready_at

    def subscribe_topic(self, topic: str, handler: Callable[[Any], None]) -> None:
        """Nothing is ever said."""

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        self.num_looks += 1
        status = "init" if self.num_looks < self.ready_at else "running"
        return {"workers": {"tcp://127.0.0.1:9": {"status": status, "host": "127.0.0.1", "name": "a"}}}


def test_a_worker_that_takes_tasks_after_its_event_is_found() -> None:
    pool = DaskPool(StartingCluster(), start_timeout_s=60.0)
    assert pool._await_workers(1, 1, time.monotonic() + 60.0) == ["tcp://127.0.0.1:9"]


def test_a_running_job_is_told_about_it_too() -> None:
    pool = DaskPool(StartingCluster(), start_timeout_s=60.0, follows_size=True)
    pool._news.put(RoomFound(0))
    assert [pool.next_news(60.0) for _ in range(3)] == [RoomFound(0), RoomFound(0), RoomFound(1)]


@pytest.mark.parametrize("ready_at", range(1, 6))
def test_a_worker_that_was_asked_for_is_held_at_whichever_look_it_is_ready(
    ready_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[str] = []
    pool = DaskPool(StartingCluster(ready_at), start_timeout_s=60.0, follows_size=True)
    monkeypatch.setattr(pool, "_hold", lambda worker, *_, **__: held.append(worker))
    pool.request(1)
    pool._news.put(RoomFound(0))  # its event, after which nothing is said any more
    for _ in range(5):
        pool.next_news(0.0)
    assert held == ["tcp://127.0.0.1:9"]
