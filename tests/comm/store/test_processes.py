"""Stores between real processes: no lost update, wake-ups, expiry, and process groups that meet in them."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.bed.ports import free_port
from tests.bed.world import World
from tests.comm.store.conftest import Place
from torsh_distributed.comm.store import open_store

pytestmark = pytest.mark.ranks

NUM_ROUNDS = 50


def rank() -> int:
    return int(os.environ["RANK"])


def count_together(url: str) -> tuple[list[int], int]:
    """Every rank adds and swaps NUM_ROUNDS times; returns its sums, and how many swaps it had to try again."""
    with open_store(url) as store:
        store.add("started", 1)
        while store.add("started", 0) < int(os.environ["WORLD_SIZE"]):
            pass
        sums, num_retries = [], 0
        for _ in range(NUM_ROUNDS):
            sums.append(store.add("sum", 1))
            current = None if not store.contains("swaps") else store.get("swaps")
            while not (swap := store.compare_and_swap("swaps", current, str(int(current or b"0") + 1))):
                num_retries += 1
                current = swap.value
        return sums, num_retries


def test_four_processes_lose_no_update(world: World, shared_place: Place) -> None:
    results = world.run(count_together, shared_place.url, num_ranks=4, backend=None)
    total = 4 * NUM_ROUNDS
    # Each sum is seen by exactly one rank, so each add was one step of its own.
    assert sorted(value for sums, _ in results for value in sums) == list(range(1, total + 1))
    with shared_place.open() as store:
        assert store.get("sum") == store.get("swaps") == str(total).encode()


def wait_or_set(url: str) -> bytes | None:
    with open_store(url) as store:
        if rank() == 0:
            store.wait(["waiting/1", "waiting/2"])
            time.sleep(0.1)  # so that the others are most likely blocked, not about to look
            store.set("signal", "go")
            return None
        store.set(f"waiting/{rank()}", "1")
        return store.get("signal", timeout_s=20)


def test_a_write_wakes_waiters_in_other_processes(world: World, shared_place: Place) -> None:
    assert world.run(wait_or_set, shared_place.url, num_ranks=3, backend=None) == [None, b"go", b"go"]


def watch_a_lease(url: str) -> tuple[bool, bool]:
    with open_store(url) as store:
        if rank() == 0:
            store.set("lease", "mine", ttl_s=1.0)
            store.set("granted", "1")
        store.wait(["granted"])
        seen_at = time.monotonic()
        is_there = store.contains("lease") or time.monotonic() - seen_at >= 1.0
        time.sleep(1.01)
        return is_there, store.contains("lease")


def test_a_key_expires_for_every_process(world: World, shared_place: Place) -> None:
    assert world.run(watch_a_lease, shared_place.url, num_ranks=2, backend=None) == [(True, False)] * 2


def reduce_together(url: str, is_hosted_by_rank_0: bool) -> tuple[float, float]:
    # The store is handed over and not kept: it must live as long as the group needs it.
    dist.init_process_group(
        "gloo",
        store=open_store(url, is_server=is_hosted_by_rank_0 and rank() == 0),
        rank=rank(),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=20),
    )
    gc.collect()
    total = torch.tensor(float(rank() + 1))
    dist.all_reduce(total)
    pair = dist.new_group([0, 1])
    part = torch.tensor(float(rank() + 1))
    if rank() < 2:
        dist.all_reduce(part, group=pair)
    dist.barrier()
    dist.destroy_process_group()
    return total.item(), part.item()


def test_a_process_group_meets_in_the_store(world: World, shared_place: Place) -> None:
    results = world.run(reduce_together, shared_place.url, False, num_ranks=3, backend=None)
    assert results == [(6.0, 3.0), (6.0, 3.0), (6.0, 3.0)]


def test_a_process_group_meets_in_a_store_that_rank_0_hosts(world: World) -> None:
    results = world.run(reduce_together, f"tcp://127.0.0.1:{free_port()}", True, backend=None)
    assert results == [(3.0, 3.0), (3.0, 3.0)]


def be_late(url: str) -> float:
    """Rank 1 comes to the store's barrier after torch's own waiting interval has passed at least once."""
    store = dist.PrefixStore("job", open_store(url))
    if rank() == 1:
        time.sleep(0.5)
    dist.distributed_c10d._store_based_barrier(
        rank(), store, "late", 2, timedelta(seconds=20), logging_interval=timedelta(seconds=0.1)
    )
    return store.add("store_based_barrier_key:late", 0)


def test_torchs_barrier_over_the_store_outlasts_a_late_rank(world: World, shared_place: Place) -> None:
    assert world.run(be_late, shared_place.url, backend=None) == [2, 2]


def use_after_fork(url: str) -> bytes:
    with open_store(url) as store:
        store.set("parent", "1")
        child = os.fork()
        if child == 0:
            store.add("both", 1)
            os._exit(0 if store.get("parent") == b"1" else 1)
        for _ in range(20):
            store.add("both", 1)
        assert os.waitpid(child, 0)[1] == 0
        return store.get("both")


def test_a_store_survives_a_fork(world: World, shared_place: Place) -> None:
    assert world.run(use_after_fork, shared_place.url, num_ranks=1, backend=None) == [b"21"]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_plain_torch_clients_meet_at_the_same_port(world: World, num_ranks: int, tcp_url: str) -> None:
    results = world.run(reduce_with_torch_alone, tcp_url, num_ranks=num_ranks, backend=None)
    assert results == [sum(range(1, num_ranks + 1))] * num_ranks
    with open_store(tcp_url) as ours:
        assert ours.num_keys() == 0


def reduce_with_torch_alone(url: str) -> float:
    port = int(url.rpartition(":")[2])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank(), world_size=int(os.environ["WORLD_SIZE"]))
    total = torch.tensor(float(rank() + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()
