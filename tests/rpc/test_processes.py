"""Workers in processes of their own: calls cross, a killed one is noticed at once, and others come and go by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.rpc import exposed_functions as there
from torsh_distributed import rpc
from torsh_distributed.errors import CommunicationError

pytestmark = pytest.mark.ranks


def call_each_other(url: str) -> tuple[Any, ...]:
    rank = dist.get_rank()
    rpc.start(f"w{rank}", store=url)
    rpc.wait_for_workers(["w0", "w1"])
    other = f"w{1 - rank}"
    large = torch.arange(3 << 20) + rank
    back = rpc.call(other, there.echo_on_a_thread, (large,))
    counter = rpc.remote(other, there.Counter, (100 * rank,))
    found = (
        rpc.call(other, os_pid),
        rpc.call(other, there.add, (torch.ones(3), rank)).tolist(),
        torch.equal(back, large),
        counter.call("increase", (5,)),
        list(rpc.stream(other, there.count_to, (30,))) == list(range(30)),
    )
    dist.barrier()
    rpc.shutdown()
    return (os.getpid(), *found)


@rpc.expose
def os_pid() -> int:
    return os.getpid()


def test_two_processes_call_each_other(world: World, tmp_path: Path) -> None:
    first, second = world.run(call_each_other, f"file://{tmp_path}/store", num_ranks=2)
    assert (first[1], second[1]) == (second[0], first[0])
    assert first[2:] == ([1.0] * 3, True, 5, True)
    assert second[2:] == ([2.0] * 3, True, 105, True)


@rpc.expose
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_a_peer(url: str) -> list[str]:
    rank = dist.get_rank()
    if rank == 1 and os.fork():
        # The worker that dies is a child: the rank itself lives, and reaps it.
        os.wait()
        rpc.start("again", store=url)
        dist.barrier()
        rpc.shutdown()
        return []
    if rank == 1:
        rpc.start("victim", store=url)
        signal.pause()
    rpc.start("caller", store=url)
    rpc.wait_for_workers(["victim"])
    pending = [rpc.call_async("victim", there.slow, (60.0,)) for _ in range(3)]
    stream = rpc.stream("victim", there.count_to, (10**9,))
    next(stream)
    rpc.call_async("victim", die)
    problems = []
    for future in pending:
        error = future.exception()
        assert isinstance(error, CommunicationError), error
        problems.append(error.message)
    with pytest.raises(CommunicationError):
        list(stream)
    # Its name stays in the store, and its address answers no more.
    with pytest.raises(CommunicationError, match="cannot be reached"):
        rpc.call("victim", there.add, (1, 2))
    # A late one takes calls as soon as it is there.
    rpc.wait_for_workers(["again"])
    assert rpc.call("again", there.add, (1, 2)) == 3
    dist.barrier()
    rpc.shutdown()
    return problems


def test_a_killed_worker_fails_what_is_under_way_at_once_and_a_late_one_is_found(world: World, tmp_path: Path) -> None:
    problems = world.run(lose_a_peer, f"file://{tmp_path}/store", num_ranks=2)[0]
    assert len(problems) == 3
    assert all("connection to victim was lost" in problem for problem in problems)
