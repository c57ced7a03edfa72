"""`torsh run --mpi`: the workers are one MPI job, and failures are reported as without it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.bed.world import World
from tests.launch.jobs import write_script
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.launch.job import launch_job
from torsh_distributed.launch.mpi.mpi_job import mpi_job
from torsh_distributed.launch.spec import Entry, JobSpec

pytestmark = [pytest.mark.needs_mpi, pytest.mark.ranks]


def be_launcher(script: str, changes: dict[str, Any]) -> int:
    """Runs in a process of its own: launches the job and returns its exit code."""
    spec = JobSpec(**{"entry": Entry(target=script), "nproc_per_node": 3, **changes})
    with mpi_job(spec) as job:
        return launch_job(job)


def launch(world: World, script: str, **changes: Any) -> tuple[int, str]:
    [outcome] = world.outcomes(be_launcher, script, changes, num_ranks=1, backend=None, timeout_s=40)
    assert outcome.is_ok, outcome.trace
    return outcome.value, outcome.output


def test_the_workers_are_one_mpi_world(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        from mpi4py import MPI
        place = MPI.COMM_WORLD
        assert (place.rank, place.size) == (rank, 3)
        leave(f"sum-{rank}", str(place.allreduce(rank + 1)))
        """,
    )
    code, output = launch(world, script)
    assert code == 0, output
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(3)] == ["6", "6", "6"]


def test_a_failed_worker_is_reported_and_the_next_attempt_is_a_new_world(world: World, tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import contextlib
        from mpi4py import MPI
        total = MPI.COMM_WORLD.allreduce(1)
        # Raw MPI: what MPICH would leave in /dev/shm after the kill is removed by hand. The backend does it itself.
        for path in {line.split()[5] for line in open("/proc/self/maps") if "/dev/shm/mpich_shm" in line}:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if attempt == 0:
            if rank == 1:
                print("lost on purpose", file=sys.stderr)
                os.kill(os.getpid(), signal.SIGKILL)
            MPI.COMM_WORLD.Barrier()
        leave(f"attempt-{attempt}-rank-{rank}", str(total))
        """,
    )
    code, output = launch(world, script, max_restarts=1)
    assert code == 0, output
    assert "rank 1 failed first: signal 9 (SIGKILL, killed)" in output
    assert "lost on purpose" in output
    assert sorted(path.name for path in tmp_path.glob("attempt-*")) == [f"attempt-1-rank-{rank}" for rank in range(3)]


def test_several_nodes_are_left_to_mpiexec() -> None:
    spec = JobSpec(entry=Entry(target=__file__), nnodes=2, master_addr="10.0.0.1")
    with pytest.raises(FeatureNotAvailable, match="--mpi starts the workers of one node"), mpi_job(spec):
        pass


def test_a_missing_script_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidArgument, match="does not exist"), mpi_job(JobSpec(entry=Entry(target="nowhere.py"))):
        pass


@pytest.mark.matrix
@pytest.mark.slow
def test_a_script_on_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            import torch.distributed as dist
            import torsh_distributed as td

            place = td.init(backend="mpi4py")
            tensor = torch.ones(3) * (td.rank() + 1)
            dist.all_reduce(tensor)
            print(f"{place.source}: {tensor.tolist()}")
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "torsh_distributed.run", "--mpi", "--nproc-per-node", "2", str(script)],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] torsh run: [3.0, 3.0, 3.0]" for rank in range(2)]
