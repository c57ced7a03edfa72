"""Ranks that die, stop, leave or disagree, and aborts: a clear error on every living rank, and soon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.bed.world import World
from tests.comm.backends.ranks import CORES, all_gather_single, barrier_within, errors_of, on_shm, the_group
from torsh_distributed.errors import (
    CommunicationError,
    InvalidArgument,
    OperationTimeout,
    ProcessFailure,
    RankOutOfBounds,
    TensorShapeMismatch,
)

pytestmark = pytest.mark.ranks

COLLECTIVES: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(10)),
    "large all_reduce": lambda: dist.all_reduce(torch.ones(3_000_000)),
    "broadcast": lambda: dist.broadcast(torch.ones(1_000_000), 0),
    "barrier": dist.barrier,
}


# ---- death ----------------------------------------------------------------------------------------------------


def die_before(name: str, victim: int, how: str) -> float:
    """The victim goes after a first collective; returns how long the others then waited in the next."""
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == victim:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    started = time.monotonic()
    with pytest.raises(ProcessFailure) as caught:
        COLLECTIVES[name]()
    assert caught.value.context["failed_rank"] == victim
    with pytest.raises(CommunicationError, match=f"does not work any more: the process of rank {victim} ended"):
        dist.barrier()
    return time.monotonic() - started


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_killed_rank_is_named_on_every_living_one(world: World, tmp_path: Path, core: str, name: str) -> None:
    outcomes = world.outcomes(on_shm, tmp_path, core, die_before, name, 1, "kill", num_ranks=3, backend=None)
    assert outcomes[1].exit_code == -signal.SIGKILL
    # Found by looking, not by the deadline of 20 s.
    assert [outcomes[rank].value is not None and outcomes[rank].value < 10 for rank in (0, 2)] == [True, True]


@pytest.mark.parametrize("core", CORES)
def test_a_rank_that_exits_is_named_too(world: World, tmp_path: Path, core: str) -> None:
    outcomes = world.outcomes(on_shm, tmp_path, core, die_before, "barrier", 0, "exit", num_ranks=2, backend=None)
    assert outcomes[1].is_ok
    assert outcomes[1].value < 10


def die_in_backward() -> str:
    """The reducer of DDP waits in C++, for a future that must fail there as well."""
    net = DistributedDataParallel(torch.nn.Linear(100, 100))
    loss = net(torch.ones(2, 100)).sum()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return str(caught.value)


@pytest.mark.needs_core
def test_a_rank_that_dies_during_backward_is_named(world: World, tmp_path: Path) -> None:
    outcomes = world.outcomes(on_shm, tmp_path, "native", die_in_backward, backend=None)
    assert "ProcessFailure: the process of rank 1 ended" in outcomes[0].value


def futures() -> None:
    total = float(sum(range(dist.get_world_size())))
    tensor = torch.full((3,), float(dist.get_rank()))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert work.get_future().then(lambda done: done.value()[0].sum().item()).wait() == 3 * total
    assert work.get_future().value()[0] is tensor
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        works = [torch.full((2,), float(dist.get_rank())), torch.ones(1)]
        dist.broadcast(works[0], 0)
        dist.broadcast(works[1], 0)
    [combined] = manager.works
    assert [part.tolist() for part in combined.get_future().wait()] == [[0.0, 0.0], [1.0]]


@pytest.mark.parametrize("core", CORES)
def test_futures_hold_the_outputs(world: World, tmp_path: Path, core: str) -> None:
    world.run(on_shm, tmp_path, core, futures, backend=None)


def die_instead_of_sending() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.ones(4), 0 if dist.get_rank() == 1 else None)


@pytest.mark.parametrize("core", CORES)
def test_a_receive_from_a_dead_rank_fails(world: World, tmp_path: Path, core: str) -> None:
    outcomes = world.outcomes(on_shm, tmp_path, core, die_instead_of_sending, num_ranks=3, backend=None)
    assert [type(error) for error in errors_of(outcomes, 1, 2)] == [ProcessFailure, ProcessFailure]


def send_and_leave() -> float:
    """A message sent before its sender left must still be received."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
        return 0.0
    assert the_group().wire.rank == 1
    while not the_group().wire._core.failure() and not has_left(0):  # type: ignore[attr-defined]  # looks inside
        time.sleep(0.01)
    got = torch.zeros(4)
    dist.recv(got, 0)
    return got.sum().item()


def has_left(rank: int) -> bool:
    """Whether a rank's process is gone, as its lock on the segment tells."""
    segment = the_group().wire._segment  # type: ignore[attr-defined]  # looks inside
    probe = subprocess.run(
        [sys.executable, "-S", "-c", _PROBE, f"/proc/{os.getpid()}/fd/{segment.fd}", str(rank)], check=False
    )
    return probe.returncode == 0


_PROBE = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(sys.argv[2]))
except OSError:
    sys.exit(1)
"""


@pytest.mark.parametrize("core", CORES)
def test_what_was_sent_before_leaving_still_arrives(world: World, tmp_path: Path, core: str) -> None:
    assert world.run(on_shm, tmp_path, core, send_and_leave, backend=None) == [0.0, 4.0]


# ---- absence ----------------------------------------------------------------------------------------------------


def stop_before_barrier() -> None:
    pids = torch.zeros(3, dtype=torch.int64)
    pids[dist.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    limit = 1.0 if dist.get_rank() == 0 else 60.0  # the third rank is released by the first one's giving up
    try:
        barrier_within(limit)
    finally:
        if dist.get_rank() == 2:
            os.kill(int(pids[1]), signal.SIGKILL)


@pytest.mark.parametrize("core", CORES)
def test_a_stopped_rank_is_missing_at_the_deadline(world: World, tmp_path: Path, core: str) -> None:
    outcomes = world.outcomes(on_shm, tmp_path, core, stop_before_barrier, num_ranks=3, backend=None)
    first, third = errors_of(outcomes, 0, 2)
    assert isinstance(first, OperationTimeout)
    assert first.context["missing_ranks"] == [1]
    assert "barrier number 2 was not done within 1 s; missing: rank 1" in str(first)
    assert isinstance(third, CommunicationError)
    assert "rank 0 gave up waiting" in str(third)


def one_leaves_early() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("core", CORES)
def test_a_rank_that_left_is_named(world: World, tmp_path: Path, core: str) -> None:
    outcomes = world.outcomes(on_shm, tmp_path, core, one_leaves_early, backend=None)
    assert isinstance(outcomes[0].error, CommunicationError)
    # Who leaves by destroying its group and then ends its process may be seen doing either.
    assert "rank 1" in str(outcomes[0].error)
    assert outcomes[1].is_ok


# ---- disagreement -------------------------------------------------------------------------------------------------


MISMATCHES: dict[str, tuple[Callable[[], object], Callable[[], object], str]] = {
    "size": (
        lambda: dist.all_reduce(torch.ones(10)),
        lambda: dist.all_reduce(torch.ones(100_000)),
        "all_reduce of 400000 bytes of float32, sum",
    ),
    "dtype": (
        lambda: dist.all_reduce(torch.ones(10)),
        lambda: dist.all_reduce(torch.ones(10, dtype=torch.int32)),
        "of int32",
    ),
    "reduction": (
        lambda: dist.all_reduce(torch.ones(10)),
        lambda: dist.all_reduce(torch.ones(10), dist.ReduceOp.MAX),
        ", max",
    ),
    "operation": (lambda: dist.all_reduce(torch.ones(10)), dist.barrier, "rank 1 barrier"),
    "root": (lambda: dist.broadcast(torch.ones(10), 0), lambda: dist.broadcast(torch.ones(10), 1), "root 1"),
    "splits": (
        lambda: dist.all_to_all([torch.empty(1), torch.empty(2)], [torch.empty(1), torch.empty(1)]),
        lambda: dist.all_to_all([torch.empty(1), torch.empty(1)], [torch.empty(1), torch.empty(1)]),
        "rank 1 sends a different number of bytes",
    ),
}


def disagree(name: str) -> None:
    MISMATCHES[name][dist.get_rank()]()  # type: ignore[operator]  # the first two are functions


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_disagree_are_told_what_both_said(world: World, tmp_path: Path, core: str, name: str) -> None:
    outcomes = world.outcomes(on_shm, tmp_path, core, disagree, name, backend=None)
    assert isinstance(outcomes[0].error, TensorShapeMismatch)
    assert MISMATCHES[name][2] in str(outcomes[0].error)
    assert isinstance(outcomes[1].error, TensorShapeMismatch | CommunicationError)


def misuse() -> None:
    rank = dist.get_rank()
    group = the_group()
    with pytest.raises(InvalidArgument, match="dense tensors in host memory"):
        dist.all_reduce(torch.ones(3, device="meta"))
    with pytest.raises(InvalidArgument, match=r"mean is not defined for torch\.bool"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)
    with pytest.raises(InvalidArgument, match=r"bxor is not defined for torch\.float32"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BXOR)
    with pytest.raises(InvalidArgument, match="sparse tensors can only be summed"):
        dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX)
    with pytest.raises(TensorShapeMismatch, match="the output has the wrong number of elements"):
        all_gather_single(torch.ones(3), torch.ones(3))
    with pytest.raises(TensorShapeMismatch, match="same dtype"):
        group.all_gather_single(torch.ones(6, dtype=torch.int32), torch.ones(3))
    with pytest.raises(InvalidArgument, match="one tensor per rank"):
        group.allgather([[torch.ones(3)]], [torch.ones(3)])
    with pytest.raises(TensorShapeMismatch, match="first dimension is not cut"):
        dist.all_to_all_single(torch.ones(3), torch.ones(3))
    with pytest.raises(RankOutOfBounds, match=r"rank 5 is outside 0\.\.1"):
        group.send([torch.ones(1)], 5, 0)
    with pytest.raises(RankOutOfBounds):
        group.broadcast([torch.ones(1)], dist.BroadcastOptions() if rank > 9 else 7)
    with pytest.raises(InvalidArgument, match="above zero"):
        barrier_within(0)
    # Nothing was sent, so nobody is out of step.
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2


@pytest.mark.parametrize("core", CORES)
def test_misuse_is_refused_before_anything_is_sent(world: World, tmp_path: Path, core: str) -> None:
    world.run(on_shm, tmp_path, core, misuse, backend=None)


def be_one_of_two_jobs(folder: Path, core: str) -> float:
    """Ranks 0 and 1 are one job, 2 and 3 another of the same name; both talk at the same time."""
    rank = int(os.environ["RANK"])
    job = rank // 2
    os.environ.update(RANK=str(rank % 2), WORLD_SIZE="2")
    (folder / str(job)).mkdir(exist_ok=True)
    return float(on_shm(folder / str(job), core, sum_often, 10.0**job))


def sum_often(value: float) -> float:
    totals = set()
    for _ in range(200):
        tensor = torch.full((5000,), value)
        dist.all_reduce(tensor)
        totals.update(tensor.tolist())
    assert len(totals) == 1, totals
    return totals.pop()


@pytest.mark.parametrize("core", CORES)
def test_two_jobs_of_one_name_do_not_meet(world: World, tmp_path: Path, core: str) -> None:
    sums = world.run(be_one_of_two_jobs, tmp_path, core, num_ranks=4, backend=None)
    assert sums == [2.0, 2.0, 20.0, 20.0]
