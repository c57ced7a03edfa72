"""mpiexec's command lines: both kinds, no value of a variable on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed.needs import mpiexec
from tests.lab.network import Lab
from tests.lab.ssh_hosts import SshHosts
from torsh_distributed.clusters.mpi_engine import MpiEngine, MpiLauncher, mpiexec_command, with_rank
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.launch.spec import Entry


def submission(**changes: object) -> Submission:
    return Submission(entry=Entry(target="train.py"), name="job", **changes)  # type: ignore[arg-type]


def line(launcher: MpiLauncher, options: dict[str, str]) -> str:
    asked = submission(nodes=2, workers_per_node=4)
    words = mpiexec_command("mpiexec", launcher, asked, options, command=["python", "x.py"], variables=["B", "A"])
    return " ".join(words)


def test_each_launcher_gets_its_own_words() -> None:
    options = {"hosts": "a,b", "args": "-bind-to core"}
    assert line(MpiLauncher.MPICH, options) == (
        "mpiexec -n 8 -ppn 4 -prepend-rank -genvlist A,B -hosts a,b -bind-to core python x.py"
    )
    assert line(MpiLauncher.OPEN_MPI, options) == (
        "mpiexec -n 8 --map-by ppr:4:node:OVERSUBSCRIBE --tag-output -x A -x B --host a:4,b:4 -bind-to core python x.py"
    )


def test_labels_become_ranks() -> None:
    assert with_rank("[3] loss 1") == "[rank 3] loss 1"
    assert with_rank("[1,12]<stderr>:loss 1") == "[rank 12] loss 1"
    assert with_rank("[mpiexec@x] killed") == "[mpiexec@x] killed"


@pytest.mark.parametrize(
    ("changes", "options", "kind", "message"),
    [
        ({"nodes": 2}, {}, InvalidArgument, "--nodes 2 needs hosts"),
        ({}, {"hostfile": "h"}, InvalidArgument, "address of the first host"),
        ({"max_restarts": 1}, {}, FeatureNotAvailable, "ends with its first rank"),
        ({"memory_per_worker": "8G"}, {}, InvalidArgument, "has no scheduler"),
        ({}, {"mpiexec": "no-such-mpiexec"}, FeatureNotAvailable, "is not found"),
        ({}, {"mpiexec": "true"}, FeatureNotAvailable, "neither MPICH's nor Open MPI's"),
    ],
)
def test_what_cannot_work_is_refused(
    changes: dict[str, object], options: dict[str, str], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        MpiEngine(options).render(submission(**changes))


pytestmark = [
    pytest.mark.ranks,
    pytest.mark.matrix,
    pytest.mark.needs_netns,
    pytest.mark.needs_command("/usr/sbin/sshd"),
    pytest.mark.timeout(300),
]

SCRIPT = """
import socket, sys

import torch
import torch.distributed as dist

import torsh_distributed as td

place = td.init()
total = torch.full((100_000,), float(td.rank()))
dist.all_reduce(total)
print(td.rank(), socket.gethostname(), place.local_world_size, int(total[-1]), "mpi4py" in sys.modules, flush=True)
td.destroy_process_group()
"""


@pytest.fixture
def agent(lab: Lab, tmp_path: Path) -> Iterator[Path]:
    """A program that mpiexec calls for ssh: with the configuration of the lab's hosts."""
    with SshHosts(lab.hosts(2), tmp_path) as ssh:
        program = tmp_path / "agent"
        program.write_text(f'#!/bin/sh\nexec ssh -F {ssh.config} "$@"\n')
        program.chmod(0o755)
        yield program


def run(lab: Lab, folder: Path, launcher: str, args: str, *settings: str, **env: str) -> list[str]:
    """What the four ranks of two hosts say, in order."""
    script = folder / "job.py"
    script.write_text(SCRIPT)
    words = ["submit", "--to", "mpi", "--nodes", "2", "--nproc-per-node", "2", "--follow"]
    for setting in (f"mpiexec={launcher}", "hosts=node0,node1", f"args={args}", *settings):
        words += ["--set", setting]
    if "MPI4PY_LIBMPI" in os.environ:  # which MPI it is, on a machine that has several
        words += ["--env", "MPI4PY_LIBMPI"]
    command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", *words, str(script)]
    state = {"TORSH_STATE_DIR": str(folder / "state")}
    done = lab.host(0).run(command, env={**state, **env}, timeout_s=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = (line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("[rank"))
    return sorted(line for line in told if line[:1].isdigit())  # MPI's transports say things too


def expected(*, has_mpi: bool) -> list[str]:
    return [f"{rank} node{rank // 2} 2 6 {has_mpi}" for rank in range(4)]


@pytest.mark.needs_command(mpiexec())
@pytest.mark.needs_mpi
@pytest.mark.parametrize("leg", ["gloo", "mpi"])
def test_mpich_starts_ranks_on_both(lab: Lab, agent: Path, tmp_path: Path, leg: str) -> None:
    args = f"-launcher ssh -launcher-exec {agent}"
    told = run(lab, tmp_path, mpiexec(), args, f"between_nodes={leg}")
    assert told == expected(has_mpi=leg == "mpi")


@pytest.mark.needs_command("mpiexec.openmpi")
def test_open_mpi_starts_ranks_on_both(lab: Lab, agent: Path, tmp_path: Path) -> None:
    args = f"--mca plm_rsh_agent {agent} --mca plm_rsh_no_tree_spawn 1"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert run(lab, tmp_path, "mpiexec.openmpi", args, **root) == expected(has_mpi=False)
