"""An Engine's job whose workers follow a host discovery script: it grows, waits for slots, and trains as if alone."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from tests.chaos.faults import wait_for_mark
from tests.elastic.jobs import run_job, wait_for_joined
from tests.elastic.test_in_place import NUM_LONG_STEPS, check_as_undisturbed

pytestmark = [pytest.mark.matrix, pytest.mark.ranks]


def set_slots(folder: Path, count: int) -> None:
    (folder / "slots.part").write_text(f"localhost:{count}\n")
    (folder / "slots.part").rename(folder / "slots")


def wait_for_end(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([pidfd], [], [], 60.0)[0], f"process {pid} does not leave"
    os.close(pidfd)


def test_training_grows_waits_and_goes_on_with_the_slots_of_a_script(tmp_path: Path) -> None:
    set_slots(tmp_path, 2)
    script = tmp_path / "discover.sh"
    script.write_text(f'#!/bin/sh\nexec cat "{tmp_path}/slots"\n')
    script.chmod(0o755)

    def meanwhile(folder: Path) -> None:
        leaving = wait_for_mark(folder, rank=1, step=5, within_s=60)
        set_slots(folder, 3)
        wait_for_joined(folder, member=2)
        set_slots(folder, 1)  # below the least: training waits
        wait_for_end(leaving)
        set_slots(folder, 2)
        wait_for_joined(folder, member=3)

    outcome = run_job(
        tmp_path,
        *("--min-workers", "2", "--max-workers", "4", "--host-discovery-script", str(script)),
        num_workers=2,
        num_steps=NUM_LONG_STEPS,
        is_slow=True,
        meanwhile=meanwhile,
        timeout_s=120.0,
    )
    check_as_undisturbed(outcome, num_steps=NUM_LONG_STEPS)
    assert "training waits: 1 slots for a job of at least 2 workers" in outcome.output
    assert sorted(outcome.weights()) == [0, 3]
    assert "lost" not in outcome.output
