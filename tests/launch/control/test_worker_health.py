"""Silence told apart: stopped, holding Python's lock, waiting for a disk; and a long step, which is none of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from torsh_distributed.launch.control.worker_health import Health, HealthLimits, HealthState, HealthWatch, judge
from torsh_distributed.launch.local.loop import Loop

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


def test_a_stopped_process_is_noticed_within_half_a_second_and_one_that_beats_is_healthy() -> None:
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
            loop.call_later(5.0, lambda: loop.stop(1))
            assert loop.run() == 0
            watch.close()
    finally:
        child.kill()
        child.wait()
    assert {member for member, _, _ in seen} == {0}
    assert [health.state for _, health, _ in seen][-1] is HealthState.FAILED
    assert seen[0][2] < 0.5
