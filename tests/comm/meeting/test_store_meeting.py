"""Ranks that meet in a store: everyone reads everyone, or is told who is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from torsh_distributed.comm.meeting.store_meeting import StoreMeeting, attempt_store, wait_for_keys
from torsh_distributed.errors import CommunicationError, OperationTimeout


def meeting(store: dist.Store, rank: int, num_ranks: int = 2, timeout_s: float = 10.0) -> StoreMeeting:
    return StoreMeeting(store, rank=rank, num_ranks=num_ranks, timeout_s=timeout_s, operation="meet in a test")


def test_every_rank_reads_every_record_in_order() -> None:
    store, found = dist.HashStore(), dict[int, list[dict[str, int]]]()

    def join(rank: int) -> None:
        found[rank] = meeting(store, rank, num_ranks=3).exchange("record", {"rank": rank})

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {rank: [{"rank": 0}, {"rank": 1}, {"rank": 2}] for rank in range(3)}


def test_every_rank_learns_what_rank_0_decides_from_all_records() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda rank: meeting(store, rank, num_ranks=3).settle("size", rank + 1, sum), range(3))
    assert list(found) == [6, 6, 6]
    assert meeting(dist.HashStore(), 0, num_ranks=1).settle("size", (1, 2), list) == [[1, 2]]


def test_every_rank_that_came_learns_who_is_missing_when_rank_0_cannot_decide() -> None:
    store = dist.HashStore()

    def settle(rank: int) -> None:
        with pytest.raises(OperationTimeout, match="missing: rank 2") as caught:
            meeting(store, rank, num_ranks=3, timeout_s=0.3).settle("size", rank, sum)
        assert caught.value.context["missing_ranks"] == [2]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(settle, range(2)))
    with pytest.raises(OperationTimeout, match="missing: rank 0"):
        meeting(dist.HashStore(), 1, timeout_s=0.1).settle("size", 1, sum)


def test_records_that_have_not_come_are_none_among_those_that_have() -> None:
    store = dist.HashStore()
    meeting(store, 1).publish("arrival", 2, "here")
    assert meeting(store, 0).poll_many("arrival", range(1, 4), timeout_s=0.1) == [None, "here", None]
    assert meeting(store, 0).poll_many("arrival", [2]) == ["here"]
    assert meeting(store, 0).poll_many("arrival", []) == []


def test_the_missing_ranks_are_named_at_the_deadline() -> None:
    store = dist.HashStore()
    meeting(store, 2).publish("record", 2, None)
    started = time.monotonic()
    with pytest.raises(OperationTimeout, match="missing: rank 1, rank 3") as caught:
        meeting(store, 0, num_ranks=4, timeout_s=0.3).exchange("record", None)
    assert time.monotonic() - started < 5
    assert caught.value.context["missing_ranks"] == [1, 3]
    assert caught.value.context["operation"] == "meet in a test"


def test_asking_who_is_missing_waits_until_the_deadline_only_if_somebody_is() -> None:
    store = dist.HashStore()
    early = meeting(store, 0, timeout_s=0.2)
    early.publish("here", 0, None)
    assert early.missing("here") == [1]
    complete = meeting(store, 1, timeout_s=60)
    complete.publish("here", 1, None)
    assert complete.missing("here") == []


def test_a_record_that_does_not_come_is_none() -> None:
    store = dist.HashStore()
    assert meeting(store, 0).poll("verdict", 0, timeout_s=0.05) is None
    meeting(store, 1).publish("verdict", 0, {"nodes": ["a"]})
    assert meeting(store, 0).poll("verdict", 0) == {"nodes": ["a"]}


def test_a_second_attempt_does_not_read_the_records_of_the_first() -> None:
    store = dist.HashStore()
    for rank in range(2):
        meeting(attempt_store(store, "shm", rank), rank).publish("record", rank, "old")
    again = meeting(attempt_store(store, "shm", 0), 0, timeout_s=0.2)
    with pytest.raises(OperationTimeout, match="missing: rank 1"):
        again.exchange("record", "new")


def test_a_store_that_goes_away_is_said() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    here = meeting(client, 0)
    here.publish("record", 0, None)
    del host
    with pytest.raises(CommunicationError, match="the store went away while the ranks were meeting"):
        here.exchange("record", None)


def test_who_leaves_waits_until_all_have_read() -> None:
    store, left = dist.HashStore(), threading.Event()

    def leave() -> None:
        meeting(store, 0).leave()
        left.set()

    first = threading.Thread(target=leave)
    first.start()
    assert not left.wait(0.2)
    meeting(store, 1).leave()
    first.join(timeout=10)
    assert left.is_set()


def test_a_rank_that_does_not_leave_keeps_nobody_for_long() -> None:
    started = time.monotonic()
    meeting(dist.HashStore(), 0, timeout_s=0.2).leave()
    assert time.monotonic() - started < 5


STORES: dict[str, Callable[[Path], dist.Store]] = {
    "hash": lambda folder: dist.HashStore(),
    "file": lambda folder: dist.FileStore(str(folder / "store"), 1),
    "tcp": lambda folder: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
}


@pytest.mark.parametrize("kind", STORES)
def test_all_keys_must_be_set_in_time(kind: str, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path)
    store.set("one", "")
    assert wait_for_keys(store, ["one"], 5.0)
    assert not wait_for_keys(store, ["one", "two"], 0.05)


def test_a_store_that_is_gone_is_not_a_timeout() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    del host
    with pytest.raises(dist.DistNetworkError):
        wait_for_keys(client, ["one"], 5.0)
