from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torsh_distributed.clusters.dask.worker_pool import DaskPool
from torsh_distributed.clusters.hosted.rank_host import SizeWanted


class StartingCluster:
    """A client of a cluster whose only worker has registered, and takes tasks a few looks later, without an event."""

    def __init__(self) -> None:
        self.num_looks = 0

    def subscribe_topic(self, topic: str, handler: Callable[[Any], None]) -> None:
        """Nothing is ever said."""

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        self.num_looks += 1
        status = "init" if self.num_looks < 3 else "running"
        return {"workers": {"tcp://127.0.0.1:9": {"status": status, "host": "127.0.0.1", "name": "a"}}}


def test_a_worker_that_takes_tasks_after_its_event_is_found() -> None:
    pool = DaskPool(StartingCluster(), start_timeout_s=60.0)
    assert pool._await_workers(1, 1, time.monotonic() + 60.0) == ["tcp://127.0.0.1:9"]


def test_a_running_job_is_told_about_it_too() -> None:
    pool = DaskPool(StartingCluster(), start_timeout_s=60.0, follows_size=True)
    pool._news.put(SizeWanted(0))
    assert [pool.next_news(60.0) for _ in range(3)] == [SizeWanted(0), SizeWanted(0), SizeWanted(1)]
