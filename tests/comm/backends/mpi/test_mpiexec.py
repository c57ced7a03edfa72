"""Whole scripts under mpiexec: how they come in, and above all how they end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.bed.needs import mpiexec
from tests.bed.ports import free_port

pytestmark = [pytest.mark.needs_mpi, pytest.mark.slow, pytest.mark.ranks]

PLAIN = """
    import sys
    import torch
    import torch.distributed as dist
    import torsh_distributed

    assert "mpi4py" not in sys.modules, "importing ours must not touch MPI"
    dist.init_process_group("mpi4py")
    rank, size = dist.get_rank(), dist.get_world_size()
    def say(text):
        sys.stdout.write(f"rank {rank}: {text}\\n")
        sys.stdout.flush()
"""


def run(folder: Path, num_ranks: int, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The script on `num_ranks` ranks, with no place in its environment but what mpiexec says."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    place = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in place}
    return subprocess.run(
        [mpiexec(), "-n", str(num_ranks), sys.executable, str(path)],
        env={**clean, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_a_plain_torch_script_runs_and_ends_in_order(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        2,
        PLAIN
        + """
    import time
    tensor = torch.arange(4.0) + rank
    dist.all_reduce(tensor)
    say(tensor.tolist())
    # Nobody destroys the group. mpiexec ends the job, without a word, if a rank exits before MPI is finalised.
    if rank == 1:
        time.sleep(1.0)
    say("ends")
    """,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank}: [1.0, 3.0, 5.0, 7.0]" in done.stdout
        assert f"rank {rank}: ends" in done.stdout
    assert not done.stderr.strip()


def test_the_launcher_of_another_mpi_is_refused(tmp_path: Path) -> None:
    """What a library sees whose mpiexec is not the one that was used: no way to its launcher, a job of one."""
    done = run(tmp_path, 2, "import os; os.environ.pop('PMI_FD')" + textwrap.dedent(PLAIN))
    assert done.returncode != 0
    assert "the launcher started 2 processes, but the MPI library sees a job of 1" in done.stderr


@pytest.mark.matrix
def test_init_finds_its_place_and_after_an_abort_the_processes_end_in_order(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        2,
        """
        import sys, threading
        import torch
        import torch.distributed as dist
        import torsh_distributed as td
        from torsh_distributed.errors import CommunicationError

        place = td.init(backend="mpi4py")
        rank = td.rank()
        def say(text):
            sys.stdout.write(f"rank {rank}: {text}\\n")
            sys.stdout.flush()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        say(f"{place.source} {td.backend()} {tensor.tolist()}")
        group = dist.group.WORLD
        if rank == 0:
            threading.Timer(0.2, lambda: group.abort("enough")).start()
        try:
            dist.recv(torch.ones(1), 1 - rank)
        except CommunicationError as error:
            say(error.message)
        say("ends")
        """,
        MASTER_PORT=str(free_port()),
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank}: MPICH mpi4py [2.0, 2.0]" in done.stdout
    assert "rank 0: this rank ended the group: enough" in done.stdout
    assert "rank 1: rank 0 ended the group: enough" in done.stdout
    assert done.stdout.count("ends") == 2


@pytest.mark.matrix
def test_a_rank_that_raises_ends_the_job(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        2,
        PLAIN
        + """
    if rank == 1:
        raise ValueError("broken on purpose")
    dist.barrier()
    say("not reached")
    """,
    )
    assert done.returncode != 0
    assert "broken on purpose" in done.stderr
    assert "not reached" not in done.stdout
    # The barrier's own deadline is half an hour: the job did not wait for it, or `run` would have raised.


@pytest.mark.matrix
def test_a_rank_killed_inside_a_collective_ends_the_job(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        3,
        PLAIN
        + """
    import os, signal, threading
    dist.barrier()
    if rank == 1:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    if rank != 2:
        dist.all_reduce(torch.ones(1000))
    threading.Event().wait(60)
    """,
    )
    assert done.returncode != 0
    assert "Killed" in done.stdout + done.stderr
