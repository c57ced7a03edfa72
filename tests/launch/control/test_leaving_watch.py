"""Ranks whose script has ended and whose process has not: named with their place, and ended after a deadline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bed.world import World
from tests.launch.jobs import launch, write_script
from torsh_distributed.launch.causes.diagnosis import diagnose
from torsh_distributed.launch.control.leaving_watch import LeavingWatch
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.worker.rank_status import RankStatus

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
