"""The test bed itself: results by rank, failures with their rank, hangs with stacks."""

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

from tests.bed.stopped_rank import stop_here
from tests.bed.world import ROOT, World, WorldError
from tests.chaos.faults import process_state

pytestmark = pytest.mark.ranks


def sum_of_ranks() -> float:
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return value.item()


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} was told to")
    return dist.get_rank()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_where_a_reader_finds_it() -> None:
    time.sleep(60)


def start_a_child_and_leave_it() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    return process_state(pid) not in ("Z", "X", None)


def wait_for(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {within_s} s"
        time.sleep(0.01)


def test_results_come_by_rank(world: World) -> None:
    assert world.run(sum_of_ranks, num_ranks=3) == [3.0, 3.0, 3.0]


def test_an_exception_keeps_its_type_and_names_the_rank(world: World) -> None:
    with pytest.raises(ValueError, match="rank 1 was told to") as caught:
        world.run(fail_on, 1)
    assert "--- rank 1 raised ValueError" in caught.value.__notes__[0]
    assert "in fail_on" in caught.value.__notes__[0]


def test_a_killed_rank_is_reported_as_such(world: World) -> None:
    with pytest.raises(WorldError, match="rank 1 was ended by signal 9"):
        world.run(die_on, 1)


def test_a_hang_shows_the_stack_of_every_rank(world: World) -> None:
    with pytest.raises(WorldError) as caught:
        world.run(wait_where_a_reader_finds_it, timeout_s=4.0, backend=None)
    for rank in (0, 1):
        assert f"rank {rank} hung" in str(caught.value)
    assert str(caught.value).count("in wait_where_a_reader_finds_it") == 2


def test_a_world_after_a_failed_one_is_fresh(world: World) -> None:
    outcomes = world.outcomes(die_on, 0)
    assert [outcome.exit_code for outcome in outcomes if outcome.rank == 0] == [-9]
    assert world.run(sum_of_ranks) == [1.0, 1.0]


def test_a_stopped_rank_is_reported_as_such(world: World, tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"(?s)rank 0 hung.*stopped by a signal.*rank 1 hung.*in stop_here"):
        world.run(stop_here, tmp_path, timeout_s=5.0)
    assert not any(is_running(int(path.read_text())) for path in tmp_path.iterdir())


def test_what_a_rank_leaves_running_is_ended_with_its_world(world: World) -> None:
    for pid in world.run(start_a_child_and_leave_it, backend=None):
        assert not is_running(pid)


@pytest.mark.parametrize("victim", ["the test process", "the zygote"])
def test_no_rank_outlives_a_killed(victim: str, tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from tests.bed.world import World; from tests.bed.stopped_rank import stop_here\n"
        f"World(is_light=True).outcomes(stop_here, Path({str(tmp_path)!r}), timeout_s=600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: len([path for path in tmp_path.iterdir() if path.read_text()]) == 2)
        ranks = [int(path.read_text()) for path in tmp_path.iterdir()]
        (zygote,) = (int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
        assert all(map(is_running, ranks))
        os.kill(parent.pid if victim == "the test process" else zygote, signal.SIGKILL)
        wait_for(lambda: not any(map(is_running, [zygote, *ranks])))
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.matrix
def test_an_interrupted_exchange_does_not_disturb_the_next() -> None:
    world = World(is_light=True)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        assert world.run(sum_of_ranks, num_ranks=1) == [0.0]
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            world.run(wait_where_a_reader_finds_it, backend=None)
        assert world.run(sum_of_ranks) == [1.0, 1.0]
    finally:
        signal.signal(signal.SIGALRM, before)
        world.close()
