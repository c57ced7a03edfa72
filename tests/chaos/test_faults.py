"""Faults on real ranks: each hits the rank, step and point it names, and no other."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typing_extensions import override

from tests.bed.world import World
from tests.chaos.faults import kill, mark, process_state, resume, stop, wait_for_mark
from torsh_distributed import events
from torsh_distributed.elastic import Fault, FaultKind, InjectedFault, inject
from torsh_distributed.elastic.faults.fault import faults_environment
from torsh_distributed.elastic.faults.inflicting import EXIT_CODE

pytestmark = pytest.mark.ranks


def train(num_steps: int, *faults: Fault) -> list[float]:
    """Runs on every rank: one small reduction a step, with a point before it and one inside."""
    sums = []
    with inject(*faults):
        for step in range(num_steps):
            events.reached("step", step)
            value = torch.tensor(float(dist.get_rank() + step))
            dist.all_reduce(value)
            sums.append(value.item())
    return sums


def reduce_large(*faults: Fault) -> None:
    bucket = torch.ones(16 * 2**20)
    with inject(*faults):
        events.reached("step", 0)
        work = dist.all_reduce(bucket, async_op=True)
        events.reached("all_reduce")
        work.wait()


def seconds_in_step(*faults: Fault) -> float:
    start = time.monotonic()
    with inject(*faults):
        events.reached("step", 0)
    took_s = time.monotonic() - start
    dist.barrier()
    return took_s


def train_with_marks(folder: Path, num_steps: int) -> int:
    """Pauses at step 1, until the test outside has done its work."""
    for step in range(num_steps):
        mark(folder, step=step)
        if step == 1:
            deadline = time.monotonic() + 20
            while not (folder / "go").exists():
                assert time.monotonic() < deadline
                time.sleep(0.005)
        dist.all_reduce(torch.ones(1))
    return num_steps


def test_a_rank_is_killed_in_the_middle_of_an_all_reduce(world: World) -> None:
    outcomes = world.outcomes(reduce_large, Fault.parse("kill rank 1 at step 0 in all_reduce"), num_ranks=3)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert "fault: kill rank 1 at step 0 in all_reduce" in outcomes[1].output
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, RuntimeError)


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [
        (FaultKind.KILL, -signal.SIGKILL),
        (FaultKind.SEGFAULT, -signal.SIGSEGV),
        (FaultKind.EXIT, 1),
        (FaultKind.RAISE, 1),
    ],
)
def test_a_fault_hits_its_rank_and_step(world: World, kind: FaultKind, exit_code: int) -> None:
    outcomes = world.outcomes(train, 4, Fault(kind=kind, rank=0, step=2))
    assert outcomes[0].exit_code == exit_code
    if kind is FaultKind.EXIT:
        assert isinstance(outcomes[0].error, SystemExit)
        assert outcomes[0].error.code == EXIT_CODE
    if kind is FaultKind.RAISE:
        assert isinstance(outcomes[0].error, InjectedFault)
    assert f"fault: {kind} rank 0 at step 2" in outcomes[0].output
    assert "fault:" not in outcomes[1].output
    assert not outcomes[1].is_ok


def test_other_steps_points_and_attempts_pass_unharmed(world: World) -> None:
    elsewhere = [
        Fault.parse("kill rank 0 at step 9"),
        Fault.parse("kill rank 0 at step 1 in save"),
        Fault.parse("kill rank 0 at step 1 of attempt 1"),
        Fault.parse("kill rank 5 at step 1"),
    ]
    assert world.run(train, 3, *elsewhere) == [[1.0, 3.0, 5.0]] * 2


def test_a_fault_hits_the_attempt_it_names(world: World) -> None:
    env = {**faults_environment("kill rank 0 at step 1 of attempt 1"), "TORCHELASTIC_RESTART_COUNT": "1"}
    assert world.outcomes(train, 3, env=env)[0].exit_code == -signal.SIGKILL


def test_a_stopped_rank_goes_on_where_it_was(world: World) -> None:
    stopped, other = world.run(seconds_in_step, Fault.parse("stop rank 0 at step 0 for 0.3 s"))
    assert stopped >= 0.3
    assert other < stopped


def test_a_delayed_rank_is_late(world: World) -> None:
    assert world.run(seconds_in_step, Fault.parse("delay rank 1 at step 0 for 0.2 s"))[1] >= 0.2


class Striker(threading.Thread):
    """Acts from outside on rank 1 once it has come to step 1, then lets the world go on."""

    def __init__(self, folder: Path, *, is_deadly: bool) -> None:
        super().__init__()
        self.folder = folder
        self.is_deadly = is_deadly
        self.states: list[str | None] = []

    @override
    def run(self) -> None:
        pid = wait_for_mark(self.folder, rank=1, step=1)
        if self.is_deadly:
            kill(pid)
        else:
            stop(pid)
            self.states.append(process_state(pid))
            resume(pid)
        self.states.append(process_state(pid))
        (self.folder / "go").touch()


def test_a_rank_is_stopped_and_resumed_from_outside(world: World, tmp_path: Path) -> None:
    striker = Striker(tmp_path, is_deadly=False)
    striker.start()
    assert world.run(train_with_marks, tmp_path, 3) == [3, 3]
    striker.join()
    assert striker.states[0] == "T"
    assert striker.states[1] != "T"


def test_a_rank_is_killed_from_outside(world: World, tmp_path: Path) -> None:
    striker = Striker(tmp_path, is_deadly=True)
    striker.start()
    outcomes = world.outcomes(train_with_marks, tmp_path, 3)
    striker.join()
    assert striker.states[0] in ("Z", None)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert isinstance(outcomes[0].error, RuntimeError)


def test_waiting_for_a_rank_that_never_comes_says_so(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"rank 3 did not reach step 7 within 0\.01 s"):
        wait_for_mark(tmp_path, rank=3, step=7, within_s=0.01)


def test_kill_returns_when_the_process_is_over() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        kill(process.pid)
        assert process.poll() == -signal.SIGKILL
