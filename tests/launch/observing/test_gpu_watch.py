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
    if attempt == 0:
        while not os.path.exists(os.path.join(numbers, WATCHED)):
            time.sleep(0.01)
        if rank == 1:
            with open(os.path.join(numbers, FAULT[0] + ".new"), "w") as file:
                file.write(FAULT[1])
            os.rename(os.path.join(numbers, FAULT[0] + ".new"), os.path.join(numbers, FAULT[0]))
            sys.exit(3)
        stay()
"""


def run_job(
    folder: Path, *, num_gpus: int, fault: tuple[str, str], visible: str | None = None, watched: str = "watched-1"
) -> subprocess.CompletedProcess[str]:
    """Two workers; rank 1 of the first attempt makes its GPU report, and fails."""
    gpus = StandIn(folder / "nvml")
    gpus.write("count", num_gpus)
    script = write_script(folder, f"FAULT, WATCHED = {fault!r}, {watched!r}\n", _WORKER)
    env = {**os.environ, **gpus.variables, "TORSH_EVENTS_DIR": str(folder / "events")}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    return subprocess.run(
        [sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def seen(folder: Path, attempt: int) -> list[str]:
    return [(folder / f"saw-{attempt}-{rank}").read_text() for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (("xid-1", "79"), "XID 79: it has fallen off the bus"),
        (("ecc-1", "2"), "2 ECC errors that its memory could not correct"),
        (("lost-1", "1"), "nothing any more: the driver has lost it"),
    ],
)
def test_the_next_worker_starts_on_another_gpu(tmp_path: Path, fault: tuple[str, str], words: str) -> None:
    done = run_job(tmp_path, num_gpus=3, fault=fault)
    assert done.returncode == 0, done.stderr
    assert seen(tmp_path, 0) == ["all", "all"]
    assert seen(tmp_path, 1) == ["GPU-stand-in-0,GPU-stand-in-2"] * 2
    text = f"GPU 1 (GPU-stand-in-1) reports {words}"
    assert f"{text}; no worker is started on it any more" in done.stderr
    assert f"proof: {text}" in done.stderr
    (incident,) = [one for one in read_incidents(tmp_path / "events") if one.failure == "bad_gpu"]
    assert (incident.status, incident.ranks, incident.detail) == ("resolved", (1,), text)
    assert incident.action == "start no worker on it"


@pytest.mark.slow
def test_a_job_for_which_no_gpu_is_left_ends_and_says_so(tmp_path: Path) -> None:
    done = run_job(tmp_path, num_gpus=2, fault=("xid-1", "48"))
    assert done.returncode == 1
    assert "1 GPU of this node is left for 2 workers: GPU 1 (GPU-stand-in-1) reports XID 48" in done.stderr
    assert "hint: the GPU needs a reset or a repair" in done.stderr
    assert not (tmp_path / "saw-1-0").exists()
    records = [json.loads(line) for line in (tmp_path / "events" / "incidents.jsonl").read_text().splitlines()]
    assert [one["status"] for one in records if one["failure"] == "bad_gpu"] == ["open", "failed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "visible", "watched"),
    [(("xid-1", "31"), None, "watched-1"), (("xid-1", "79"), "2,0", "watched-0")],
    ids=["an error of a program", "a GPU that the job does not see"],
)
def test_what_says_nothing_about_a_gpu_of_the_job_changes_nothing(
    tmp_path: Path, fault: tuple[str, str], visible: str | None, watched: str
) -> None:
    done = run_job(tmp_path, num_gpus=3, fault=fault, visible=visible, watched=watched)
    assert done.returncode == 0, done.stderr
    assert seen(tmp_path, 1) == [visible or "all"] * 2
    assert "no worker is started" not in done.stderr


def test_xids_of_programs_say_nothing_about_the_gpu() -> None:
    assert xid_reason(13) is None
    assert xid_reason(31) is None
    assert xid_reason(79) == "XID 79: it has fallen off the bus"
    assert xid_reason(143) == "XID 143"
