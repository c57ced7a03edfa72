"""`torsh run --as horovod --host-discovery-script`: real jobs whose slots change while they train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.migrate.horovod.elastic.discovery_jobs import check, records, set_slots, start, wait_for

pytestmark = [pytest.mark.matrix, pytest.mark.ranks]


def test_slots_come_and_go_and_every_sample_and_step_counts_once(tmp_path: Path) -> None:
    set_slots(tmp_path, "localhost:2\n")
    job = start(tmp_path, "-np", "2", "--min-np", "1", "--max-np", "4", script_args=("--stages", "2,3,1"))
    assert job.wait(timeout=300) == 0, (tmp_path / "out").read_text()
    assert check(tmp_path) == [2, 3, 1]
    ends = [one for one in records(tmp_path) if one["event"] == "end"]
    assert [(one["rank"], one["size"], one["resets"]) for one in ends] == [(0, 1, [3, 1])]
    assert "slots for 3 workers, 2 are there" in (tmp_path / "out").read_text()


def test_a_failed_host_gets_workers_again_after_its_cooldown(tmp_path: Path) -> None:
    set_slots(tmp_path, "localhost:2\n")
    line = ["-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "4"]
    job = start(tmp_path, *line, script_args=("--stages", "2,3", "--crash-in-stage", "1"))
    assert job.wait(timeout=300) == 0, (tmp_path / "out").read_text()
    sizes = check(tmp_path)
    assert sizes[:2] == [2, 1]
    assert sizes[-1] == 3
    said = (tmp_path / "out").read_text()
    assert re.search(r"node 0 gets no new workers for \d+\.\d s, because one failed there", said), said


def test_below_the_least_training_waits_for_slots_and_then_ends(tmp_path: Path) -> None:
    set_slots(tmp_path, "localhost:3\n")
    line = ["--min-np", "2", "--max-np", "3", "--elastic-timeout", "20"]
    job = start(tmp_path, *line, script_args=("--stages", "3,1"))
    wait_for(tmp_path, "training waits: 1 slots for a job of at least 2 workers")
    (tmp_path / "slots").unlink()  # a script that fails changes nothing
    wait_for(tmp_path, "its last answer stays in force")
    set_slots(tmp_path, "localhost:2\n")
    wait_for(tmp_path, "joined: 2 workers from step")
    set_slots(tmp_path, "\n")
    assert job.wait(timeout=120) == 1, (tmp_path / "out").read_text()
    said = (tmp_path / "out").read_text()
    assert "the host discovery script offers too few slots: 0 slots for a job of at least 2 workers for 20 s" in said
