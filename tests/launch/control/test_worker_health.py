"""Silence told apart: stopped, holding Python's lock, waiting for a disk; and a long step, which is none of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bed.world import World
from tests.launch.jobs import launch, write_script
from torsh_distributed.launch.causes.diagnosis import diagnose
from torsh_distributed.launch.control.worker_health import (
    Health,
    HealthLimits,
    HealthState,
    HealthWatch,
    LeavingWatch,
    judge,
)
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.worker.rank_status import RankStatus

LIMITS = HealthLimits(stopped_s=0.4, silent_s=10.0)


@pytest.mark.parametrize(
    ("silent_s", "letter", "is_busy", "state", "word"),
    [
        (0.1, "S", False, HealthState.HEALTHY, ""),
        (0.35, "T", False, HealthState.CRITICAL, "SIGSTOP"),
        (0.5, "T", False, HealthState.FAILED, "SIGSTOP"),
        (60.0, "t", False, HealthState.DEGRADED, "debugger"),
        (1.0, "R", True, HealthState.DEGRADED, "computes in native code"),
        (6.0, "S", False, HealthState.CRITICAL, "waits in native code"),
        (11.0, "R", True, HealthState.FAILED, "Python's lock"),
        (11.0, "D", False, HealthState.FAILED, "file system"),
    ],
)
def test_silence_is_judged_by_what_the_kernel_says(
    silent_s: float, letter: str, is_busy: bool, state: HealthState, word: str
) -> None:
    found = judge(silent_s, letter, is_busy, LIMITS)
    assert found.state is state
    assert word in found.reason


def test_a_stopped_process_is_noticed_long_before_a_silent_one_and_one_that_beats_is_healthy() -> None:
    seen: list[tuple[int, Health, float]] = []
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        with Loop() as loop:
            started_s = time.monotonic()

            def note(member: int, health: Health) -> None:
                seen.append((member, health, time.monotonic() - started_s))
                if health.state is HealthState.FAILED:
                    loop.stop(0)

            watch = HealthWatch(loop, LIMITS, note)

            def beat() -> None:
                watch.beat(1)
                loop.call_later(0.1, beat)

            watch.watch(1, os.getpid())
            beat()
            watch.beat(2)  # of one that does not train yet
            watch.watch(0, child.pid)
            os.kill(child.pid, signal.SIGSTOP)
            loop.call_later(60.0, lambda: loop.stop(1))
            assert loop.run() == 0
            watch.close()
    finally:
        child.kill()
        child.wait()
    assert {member for member, _, _ in seen} == {0}
    assert [health.state for _, health, _ in seen][-1] is HealthState.FAILED
    assert seen[0][2] < LIMITS.silent_s


LINGER = """
    import atexit, threading
    def linger():
        threading.Event().wait()
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("start", "place"),
    [
        ('threading.Thread(target=linger, name="uploader").start()', "thread uploader: worker.py:"),
        ("atexit.register(linger)", "in linger"),
    ],
)
def test_a_rank_that_hangs_at_its_exit_is_named_and_ended(world: World, tmp_path: Path, start: str, place: str) -> None:
    script = write_script(tmp_path, LINGER, f"if rank == 1:\n    {start}\n")
    (outcome,) = launch(world, script, exit_timeout_s=1.0)
    assert outcome.value == 137, outcome.output
    said = outcome.output.partition("rank 1 has come to the end of its script, but its process does not end: ")[2]
    assert place in said.splitlines()[0], outcome.output
    assert "rank 1 failed first: its script ended, its process did not within 1 s" in outcome.output


def test_one_that_ends_in_time_is_not_spoken_of() -> None:
    said: list[str] = []
    with Loop() as loop:
        watch = LeavingWatch(
            loop, limit_s=0.02, ask=lambda: None, warn=said.append, end=lambda *word: said.append("end")
        )
        watch.note(RankStatus(rank=3, has_finished=True))
        watch.forget(3)
        loop.call_later(0.1, lambda: loop.stop(0))
        loop.run()
    assert said == []


def test_the_doctor_calls_it_stuck() -> None:
    status = RankStatus(rank=1, has_finished=True, threads=("uploader: train.py:3 in linger",))
    found = diagnose({1: status}, {0, 1}, num_ranks=2, leaving={1: 30.0})
    assert found.is_stuck
    assert found.rank == 1
    assert "train.py:3 in linger" in found.text
    assert not diagnose({1: status}, {0, 1}, num_ranks=2, leaving={1: 0.5}).is_stuck
