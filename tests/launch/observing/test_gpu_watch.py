"""GPUs that report errors, through NVIDIA's own package and a stand-in for its driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.green.nvml_stand_in import StandIn
from tests.launch.jobs import write_script
from torsh_distributed.elastic.incidents.incident_history import read_incidents
from torsh_distributed.launch.observing.gpu_watch import xid_reason

_WORKER = """
    numbers = os.environ["NVML_STAND_IN"]
    leave(f"saw-{attempt}-{rank}", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    if attempt < len(FAULTS):
        name, number = FAULTS[attempt]
        while not os.path.exists(os.path.join(numbers, WATCHED)):
            time.sleep(0.01)
        if rank == 1:
            wait_for(f"saw-{attempt}-0")  # a worker that is ended while it starts leaves nothing
            with open(os.path.join(numbers, name + ".new"), "w") as file:
                file.write(number)
            os.rename(os.path.join(numbers, name + ".new"), os.path.join(numbers, name))
            sys.exit(3)
        stay()
"""


def run_job(
    folder: Path, *faults: tuple[str, str], num_gpus: int, visible: str | None = None, watched: str = "watched-1"
) -> subprocess.CompletedProcess[str]:
    """Two workers; rank 1 of an attempt makes its GPU report the attempt's fault, and fails."""
    gpus = StandIn(folder / "nvml")
    gpus.write("count", num_gpus)
    script = write_script(folder, f"FAULTS, WATCHED = {faults!r}, {watched!r}\n", _WORKER)
    env = {**os.environ, **gpus.variables, "TORSH_EVENTS_DIR": str(folder / "events")}
    env["PET_START_METHOD"] = "spawn"  # these scripts need no torch
    env.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    restarts = ["--max-restarts", str(len(faults))]
    return subprocess.run(
        [sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", "2", *restarts, script],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def seen(folder: Path, attempt: int) -> list[str]:
    return [(folder / f"saw-{attempt}-{rank}").read_text() for rank in (0, 1)]


def stand_ins(*indices: int) -> str:
    return ",".join(f"GPU-stand-in-{index}" for index in indices)


@pytest.mark.slow
def test_the_next_worker_starts_on_another_gpu(tmp_path: Path) -> None:
    """After every kind of fault, but not after an error of a program."""
    faults = {
        ("ecc-1", "2"): "GPU 1 (GPU-stand-in-1) reports 2 ECC errors that its memory could not correct",
        ("xid-4", "79"): "GPU 4 (GPU-stand-in-4) reports XID 79: it has fallen off the bus",
        ("lost-3", "1"): "GPU 3 (GPU-stand-in-3) reports nothing any more: the driver has lost it",
    }
    done = run_job(tmp_path, ("xid-1", "31"), *faults, num_gpus=5)
    assert done.returncode == 0, done.stderr
    left = ["all", "all", stand_ins(0, 4, 2, 3), stand_ins(0, 3, 2), stand_ins(0, 2)]
    assert [seen(tmp_path, attempt) for attempt in range(5)] == [[one] * 2 for one in left]
    for text in faults.values():
        assert f"{text}; no worker is started on it any more" in done.stderr
        assert f"proof: {text}" in done.stderr
    assert done.stderr.count("no worker is started") == len(faults)
    incidents = [one for one in read_incidents(tmp_path / "events") if one.failure == "bad_gpu"]
    assert [one.detail for one in incidents] == list(faults.values())
    for incident in incidents:
        assert (incident.status, incident.ranks) == ("resolved", (1,))
        assert incident.action == "start no worker on it"


@pytest.mark.slow
def test_a_job_for_which_no_gpu_is_left_ends_and_says_so(tmp_path: Path) -> None:
    done = run_job(tmp_path, ("xid-1", "48"), num_gpus=2)
    assert done.returncode == 1
    assert "1 GPU of this node is left for 2 workers: GPU 1 (GPU-stand-in-1) reports XID 48" in done.stderr
    assert "hint: the GPU needs a reset or a repair" in done.stderr
    assert not (tmp_path / "saw-1-0").exists()
    records = [json.loads(line) for line in (tmp_path / "events" / "incidents.jsonl").read_text().splitlines()]
    assert [one["status"] for one in records if one["failure"] == "bad_gpu"] == ["open", "failed"]


@pytest.mark.slow
def test_a_gpu_that_the_job_does_not_see_changes_nothing(tmp_path: Path) -> None:
    done = run_job(tmp_path, ("xid-1", "79"), num_gpus=3, visible="2,0", watched="watched-0")
    assert done.returncode == 0, done.stderr
    assert seen(tmp_path, 1) == ["2,0"] * 2
    assert "no worker is started" not in done.stderr


def test_xids_of_programs_say_nothing_about_the_gpu() -> None:
    assert xid_reason(13) is None
    assert xid_reason(31) is None
    assert xid_reason(79) == "XID 79: it has fallen off the bus"
    assert xid_reason(143) == "XID 143"
