"""One script, unchanged, under every engine: the losses are those of `torsh run`.

An engine joins by adding a function to `RUNS`: it runs `SCRIPT` on two ranks with the given file for the losses.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bed.needs import mpiexec
from tests.clusters.dask.conftest import DaskProcesses
from tests.clusters.engine_marks import DASK, RAY
from tests.clusters.ray.conftest import local_ray
from tests.lab.network import Lab
from tests.lab.ssh_hosts import SshHosts
from torsh_distributed.clusters import JobState, submit
from torsh_distributed.clusters.dask.dask_connection import client_of

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "train_job.py"
TORSH = [sys.executable, "-m", "torsh_distributed.cli.entry_point"]
Run = Callable[[Path, pytest.FixtureRequest], None]


def by_engine(out: Path, engine: str, **options: str) -> None:
    """Two ranks by `submit`; all of the output is in the failure.

    In a directory of its own: beside the script are folders called as engines, which would be imported for them.
    """
    folder = out.parent / "job"
    folder.mkdir()
    script = shutil.copy(SCRIPT, folder)
    job = submit(script, str(out), to=engine, nproc_per_node=2, working_dir=folder, options=options)
    lines = list(job.logs(follow=True))
    status = job.status()
    assert status.state is JobState.SUCCEEDED, (status, "\n".join(lines))
    assert status.exit_code == 0
    assert any(line.startswith("[rank 1] rank 1 of 2 ends at") for line in lines), lines


def by_slurm(out: Path, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("slurm")
    by_engine(out, "slurm")


def by_mpich(out: Path, request: pytest.FixtureRequest) -> None:
    by_engine(out, "mpi", mpiexec=mpiexec())


def by_open_mpi(out: Path, request: pytest.FixtureRequest) -> None:
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    by_engine(out, "mpi", mpiexec="mpiexec.openmpi")


def by_ssh(out: Path, request: pytest.FixtureRequest) -> None:
    """One rank on each of two hosts of the lab, submitted from a third."""
    lab: Lab = request.getfixturevalue("lab")
    with SshHosts(lab.hosts(2), out.parent) as ssh:
        settings = ["--set", "hosts=node0,node1", "--set", f"config={ssh.config}", "--set", "heartbeat_timeout=60"]
        command = [*TORSH, "submit", "--to", "ssh", "--nodes", "2", *settings, "--follow", str(SCRIPT), str(out)]
        done = lab.host(2).run(command, timeout_s=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rank 1] rank 1 of 2 ends at" in done.stdout
    assert "succeeded" in done.stderr


def by_ray(out: Path, request: pytest.FixtureRequest) -> None:
    """Through the job server of a Ray on this machine."""
    with local_ray(out.parent, include_dashboard=True) as ray:
        url = ray._private.worker.global_worker.node.webui_url
        by_engine(out, "ray", address=f"http://{url}", python=sys.executable)


def by_dask(out: Path, request: pytest.FixtureRequest) -> None:
    """On a scheduler and two workers that are processes of their own."""
    with DaskProcesses(out.parent) as processes:
        for _ in range(2):
            processes.add_worker()
        with client_of(processes.address) as client:
            client.wait_for_workers(2, timeout=60)
        by_engine(out, "dask", address=processes.address)


RUNS = {
    "slurm": pytest.param(by_slurm, marks=pytest.mark.matrix),
    "mpich": pytest.param(by_mpich, marks=[pytest.mark.needs_command(mpiexec()), pytest.mark.matrix]),
    "open_mpi": pytest.param(by_open_mpi, marks=[pytest.mark.needs_command("mpiexec.openmpi"), pytest.mark.matrix]),
    "ssh": pytest.param(
        by_ssh, marks=[pytest.mark.needs_netns, pytest.mark.needs_command("/usr/sbin/sshd"), pytest.mark.matrix]
    ),
    "ray": pytest.param(by_ray, marks=[*RAY, pytest.mark.matrix]),
    "dask": pytest.param(by_dask, marks=[*DASK, pytest.mark.matrix]),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The losses under `torsh run`, which is run once for all processes of a parallel test run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    out = folder / "losses-of-torsh-run"
    with (folder / "losses-of-torsh-run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            draft = folder / "losses-of-torsh-run.draft"
            command = [*TORSH, "run", "--nproc-per-node", "2", str(SCRIPT), str(draft)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stdout + done.stderr
            draft.rename(out)
    losses = out.read_text()
    assert len(losses.splitlines()) == 12
    return losses


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_an_engine_gives_the_losses_of_torsh_run(
    run: Run, reference: str, state_dir: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run(tmp_path / "losses", request)
    assert (tmp_path / "losses").read_text() == reference
