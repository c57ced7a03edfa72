"""SLURM on two nodes, each a host of the lab: ranks find each other over the network, within a range of ports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.lab.network import Lab
from tests.lab.slurm_cluster import PROGRAMS, SlurmCluster

pytestmark = [pytest.mark.ranks, pytest.mark.matrix, *(pytest.mark.needs_command(program) for program in PROGRAMS)]

SCRIPT = """
import socket

import torch
import torch.distributed as dist

import torsh_distributed as td

place = td.init()
total = torch.tensor([float(td.rank())])
dist.all_reduce(total)
print(td.rank(), socket.gethostname(), place.local_world_size, place.master_addr, int(total), flush=True)
td.destroy_process_group()
"""


def test_ranks_of_two_nodes_meet_over_the_network(lab: Lab, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "slurm"
    folder.mkdir()
    with SlurmCluster(folder, hosts=lab.hosts(2)) as cluster:
        words = ["submit", "--to", "slurm", "--nodes", "2", "--nproc-per-node", "2", "--follow"]
        settings = ["--set", "port_range=31300-31340"]
        command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", *words, *settings, str(script)]
        env = {**cluster.env, "TORSH_STATE_DIR": str(tmp_path / "state")}
        done = lab.host(0).run(command, env=env, timeout_s=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = sorted(line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("[rank"))
    assert told == [f"{rank} node{rank // 2} 2 node0 6" for rank in range(4)], done.stdout + done.stderr
