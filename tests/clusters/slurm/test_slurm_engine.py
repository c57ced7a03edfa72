"""Jobs of a real SLURM: how they fail, save, go back into the queue, are cancelled, and what is refused."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import pytest

from tests.lab.slurm_cluster import SlurmCluster
from tests.launch.jobs import still_running, wait_for_text
from torsh_distributed.cli.cluster.following import follow_to_the_end
from torsh_distributed.clusters import JobState, SubmittedJob, find_job, submit
from torsh_distributed.errors import CommunicationError, FeatureNotAvailable, InvalidArgument, OperationTimeout

pytestmark = pytest.mark.ranks

PROLOGUE = """
import os, pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
rank, attempt = int(os.environ["SLURM_PROCID"]), int(os.environ.get("SLURM_RESTART_COUNT", 0))
def leave(name, text="x"):
    (here / f"{name}.part").write_text(text)
    (here / f"{name}.part").rename(here / name)
"""
SAVING = """
def save(number, frame):
    leave(f"saved-{rank}-{attempt}")
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
signal.signal(signal.SIGTERM, save)
leave(f"{sys.argv[1]}-{rank}-{attempt}")
while attempt == 0:
    time.sleep(0.02)
"""


def write(folder: Path, name: str, body: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(PROLOGUE + textwrap.dedent(body))
    return path


def wait_until_over(job: SubmittedJob, timeout_s: float = 120.0) -> JobState:
    deadline = time.monotonic() + timeout_s
    while not (status := job.status()).state.is_over:
        assert time.monotonic() < deadline, (status, list(job.logs()))
        time.sleep(0.1)
    return status.state


def test_the_first_rank_that_failed_is_named_and_arrays_get_gpus(slurm: SlurmCluster, tmp_path: Path) -> None:
    failing = write(tmp_path, "failing", 'if rank == 1:\n    raise ValueError("bad batch")\ntime.sleep(600)\n')
    shown = ("SLURM_ARRAY_TASK_ID", "CUDA_VISIBLE_DEVICES", "SLURM_NTASKS", "OMP_NUM_THREADS", "MINE")
    telling = write(tmp_path, "telling", f'print(" ".join(os.environ[name] for name in {shown}))')
    failed = submit(failing, to="slurm", nproc_per_node=2)
    array = submit(
        telling,
        to="slurm",
        nproc_per_node=2,
        gpus_per_worker=1,
        env={"MINE": "a 'quoted' value"},
        options={"array": "3-4"},
    )
    lines = list(failed.logs(follow=True))
    status = failed.status()
    assert (status.state, status.exit_code) == (JobState.FAILED, 1)
    assert "rank 1 on" in status.detail
    assert "failed first: ValueError: bad batch at" in status.detail
    assert any(line == "[rank 1] ValueError: bad batch" for line in lines), lines
    assert wait_until_over(array) is JobState.SUCCEEDED
    told = sorted(line.partition("] ")[2] for line in find_job(array.record.job_id).logs() if line.startswith("[rank"))
    assert [line.partition(" ")[0] for line in told] == ["3", "3", "4", "4"]
    assert all(line.endswith("2 1 a 'quoted' value") and len(line.split()[1].split(",")) == 2 for line in told), told


def test_ranks_save_when_told_and_the_job_goes_back_into_the_queue(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = submit(write(tmp_path, "saving", SAVING), "up", to="slurm", nproc_per_node=2)
    for rank in range(2):
        wait_for_text(tmp_path / f"up-{rank}-0", timeout_s=60)
    assert slurm.run("scancel", "--signal=USR1", job.record.job_id).returncode == 0
    for rank in range(2):
        wait_for_text(tmp_path / f"saved-{rank}-0")
        wait_for_text(tmp_path / f"up-{rank}-1", timeout_s=90)
    assert wait_until_over(job) is JobState.SUCCEEDED
    assert "goes back into the queue" in "\n".join(job.logs())


def test_a_cancelled_job_ends_for_good_and_one_that_never_starts_is_given_up(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    script = write(tmp_path, "saving", SAVING)
    job = submit(script, "up", to="slurm", nproc_per_node=2)
    outside = submit(script, "other", to="slurm", nproc_per_node=2)
    for name in ("up", "other"):
        for rank in range(2):
            wait_for_text(tmp_path / f"{name}-{rank}-0", timeout_s=60)
    waiting = submit(script, "queued", to="slurm", nproc_per_node=8)  # more than is free
    with pytest.raises(OperationTimeout, match=r"did not start within 0.2 s and was cancelled; it waited for: PENDING"):
        follow_to_the_end(waiting, queue_limit_s=0.2)
    assert waiting.status().state is JobState.CANCELLED
    assert slurm.run("scancel", outside.record.job_id).returncode == 0
    job.cancel()
    assert job.status().state is JobState.CANCELLED
    assert wait_until_over(outside) is JobState.CANCELLED
    job.cancel()
    assert still_running(script, timeout_s=60) == []
    assert job.status().state is JobState.CANCELLED


def test_what_cannot_run_is_refused_and_nothing_is_left(slurm: SlurmCluster, state_dir: Path, tmp_path: Path) -> None:
    script = write(tmp_path, "telling", "")
    with pytest.raises(CommunicationError, match=r"sbatch.*not available") as caught:
        submit(script, to="slurm", nodes=3, name="big")
    assert "what there is: main*: 1 nodes" in str(caught.value)
    with pytest.raises(CommunicationError, match="invalid partition"):
        submit(script, to="slurm", options={"partition": "none"}, name="lost")
    with pytest.raises(InvalidArgument, match="has no setting 'partitoin'") as typo:
        submit(script, to="slurm", options={"partitoin": "main"}, name="typo")
    assert "did you mean 'partition'?" in str(typo.value)
    assert list((state_dir / "jobs").iterdir()) == []
    job = submit(script, to="slurm")
    with pytest.raises(FeatureNotAvailable, match="keep the size"):
        job.scale(4)
    assert wait_until_over(job) is JobState.SUCCEEDED


def test_an_unreachable_controller_is_an_error_in_words(
    state_dir: Path, tmp_path: Path, slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "slurm.conf"
    text = Path(slurm.env["SLURM_CONF"]).read_text()
    lines = ["SlurmctldPort=1" if line.startswith("SlurmctldPort") else line for line in text.splitlines()]
    config.write_text("\n".join([*lines, "MessageTimeout=2"]))
    (tmp_path / "gres.conf").write_text("")
    monkeypatch.setenv("SLURM_CONF", str(config))
    with pytest.raises(CommunicationError, match=r"Unable to contact slurm controller|connect failure"):
        submit(write(tmp_path, "telling", ""), to="slurm")
    assert list((state_dir / "jobs").iterdir()) == []
