"""One-sided memory: what one process puts another gets, numbers are added once each, and the owner need not run."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.rpc.conftest import MakeWorker
from torsh_distributed import rpc
from torsh_distributed.errors import CommunicationError, FeatureNotAvailable, InvalidArgument, OperationTimeout

pytestmark = pytest.mark.needs_core  # compiled with it


@pytest.fixture
def pair(make_worker: MakeWorker) -> tuple[rpc.Window, rpc.Window]:
    """A window of (3, 4) doubles, as its owner and as another has it."""
    owner, other = make_worker("owner"), make_worker("other")
    return rpc.window("w", (3, 4), torch.float64, worker=owner), rpc.open_window("owner", "w", worker=other)


def test_what_is_put_is_what_the_owner_and_others_get(pair: tuple[rpc.Window, rpc.Window]) -> None:
    mine, theirs = pair
    theirs.put(torch.tensor([1.0, 2.0], dtype=torch.float64), 5)
    assert mine.tensor.flatten().tolist() == [0.0] * 5 + [1.0, 2.0] + [0.0] * 5
    mine.tensor[2, 3] = 9.0
    theirs.fence()
    assert torch.equal(theirs.get(), mine.tensor)
    assert theirs.get(6, 1).tolist() == [2.0]
    out = torch.empty(2, dtype=torch.float64)
    assert theirs.get(10, out=out) is out
    assert out.tolist() == [0.0, 9.0]
    theirs.accumulate(torch.ones(12, dtype=torch.float64))
    theirs.accumulate(torch.full((1,), 0.5, dtype=torch.float64), 11)
    assert mine.tensor[2, 3].item() == 10.5
    assert (theirs.provider, theirs.kernel_bypass) == ("shared memory", True)


def test_access_outside_a_window_is_refused_and_changes_nothing(pair: tuple[rpc.Window, rpc.Window]) -> None:
    mine, theirs = pair
    two = torch.ones(2, dtype=torch.float64)
    for access in (
        lambda: theirs.put(two, 11),
        lambda: theirs.put(two, -1),
        lambda: theirs.get(11, 2),
        lambda: theirs.get(13),
        lambda: theirs.get(0, -1),
        lambda: theirs.accumulate(two, 11),
        lambda: theirs.fetch_and_add(12, 1.0),
        lambda: theirs.fetch_and_add(-1, 1.0),
    ):
        with pytest.raises(InvalidArgument, match="outside the window"):
            access()
    with pytest.raises(InvalidArgument, match="another dtype"):
        theirs.put(torch.ones(1))
    with pytest.raises(FeatureNotAvailable, match=r"not atomic for torch.float64"):
        theirs.compare_and_swap(0, 0, 1)
    assert not mine.tensor.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_numbers_that_many_threads_add_to_lose_none(make_worker: MakeWorker, dtype: torch.dtype) -> None:
    owner = make_worker("owner")
    counter = rpc.window("c", (2,), dtype, worker=owner)
    ones = torch.ones(2, dtype=dtype)

    def add() -> set[float]:
        seen = {counter.fetch_and_add(1, 1) for _ in range(500)}
        for _ in range(200):
            counter.accumulate(ones)
        return seen

    with ThreadPoolExecutor(4) as threads:
        seen = [future.result() for future in [threads.submit(add) for _ in range(4)]]
    assert counter.get().tolist() == [800, 2800]
    assert all(len(one) == 500 for one in seen)


def test_whole_numbers_are_compared_and_swapped(make_worker: MakeWorker) -> None:
    numbers = rpc.window("n", (2,), torch.int64, worker=make_worker("owner"))
    assert numbers.compare_and_swap(1, 0, 2**40) == 0
    assert numbers.compare_and_swap(1, 0, 7) == 2**40
    assert numbers.get().tolist() == [0, 2**40]
    assert numbers.fetch_and_add(1, -(2**40)) == 2**40


def test_the_lock_excludes_others_and_has_a_deadline(pair: tuple[rpc.Window, rpc.Window]) -> None:
    mine, theirs = pair
    with mine.lock() as was_left:
        assert was_left is False
        with pytest.raises(InvalidArgument, match="holds the window's lock already"), theirs.lock():
            pass
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(lambda: theirs.lock(timeout_s=0.05).__enter__())
            with pytest.raises(OperationTimeout, match="another process holds"):
                waiting.result()
    with theirs.lock():
        pass


def test_what_cannot_be_opened_is_named(make_worker: MakeWorker) -> None:
    worker = make_worker("owner")
    with pytest.raises(InvalidArgument, match="has no window of this name"):
        rpc.open_window("owner", "w", worker=worker)
    with pytest.raises(InvalidArgument, match="no worker named"):
        rpc.open_window("nobody", "w", worker=worker)
    rpc.window("w", (1,), worker=worker).close()
    with pytest.raises(CommunicationError, match="cannot be opened"):
        rpc.open_window("owner", "w", worker=worker)


def across_processes(url: str) -> list[int]:
    """Rank 1 is stopped by SIGSTOP while rank 0 uses its window; then a child is killed with the lock."""
    rank = dist.get_rank()
    rpc.start(f"w{rank}", store=url)
    counter = rpc.window("c", (4,), torch.int64) if rank == 1 else None
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        assert counter is not None
        dist.barrier()
        return counter.get().tolist()
    theirs = rpc.open_window("w1", "c")
    os.kill(pids[1], signal.SIGSTOP)
    try:
        late = rpc.open_window("w1", "c")  # also opened while it is stopped
        for _ in range(100):
            late.fetch_and_add(0, 2)
        theirs.put(torch.tensor([5, 6]), 1)
        assert theirs.compare_and_swap(3, 0, 9) == 0
        assert late.get().tolist() == [200, 5, 6, 9]
        child = os.fork()
        if not child:
            with theirs.lock():
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        with late.lock(timeout_s=30.0) as was_left:
            assert was_left is True
    finally:
        os.kill(pids[1], signal.SIGCONT)
    dist.barrier()
    rpc.shutdown()
    return theirs.get().tolist()  # the memory stays


@pytest.mark.ranks
def test_a_stopped_owner_is_written_to_and_a_killed_holder_gives_the_lock_up(world: World, tmp_path: Path) -> None:
    assert world.run(across_processes, f"file://{tmp_path}/store", num_ranks=2) == [[200, 5, 6, 9]] * 2
