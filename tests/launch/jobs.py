"""Jobs for tests: launchers in processes of their own, workers that are tiny scripts without torch.

A launcher is a rank of the `world` fixture (forked, so torch need not be imported again) that calls
`launch_job`; one rank per node. Scripts start with PROLOGUE and act on their launcher through its pid.
"""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path
from typing import Any

from tests.bed.world import World
from tests.bed.zygote import Outcome
from tests.lab.network import Host
from torsh_distributed.launch.job import launch_job
from torsh_distributed.launch.spec import Entry, JobSpec

PROLOGUE = """\
import os, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
launcher = os.getppid()
folder = os.path.dirname(os.path.abspath(__file__))
def wait_for(*names, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not all(os.path.exists(os.path.join(folder, name)) for name in names):
        assert time.monotonic() < deadline, f"{names} did not appear"
        time.sleep(0.005)
def leave(name, text=""):
    path = os.path.join(folder, name)
    with open(path + ".part", "w") as file:
        file.write(text)
    os.rename(path + ".part", path)
"""


def write_script(folder: Path, *parts: str) -> str:
    """A worker's script: PROLOGUE, then the parts, each with its own indentation taken away."""
    path = folder / "worker.py"
    path.write_text(PROLOGUE + "".join(map(textwrap.dedent, parts)))
    return str(path)


def be_launcher(script: str, changes: dict[str, Any], per_node: list[dict[str, Any]]) -> int:
    """Runs on every rank of the world: the launcher of one node; returns the job's exit code."""
    node_rank = int(os.environ["RANK"])
    values: dict[str, Any] = {
        "entry": Entry(target=script),
        "nproc_per_node": 2,
        "nnodes": int(os.environ["WORLD_SIZE"]),
        "node_rank": node_rank,
        "join_timeout_s": 20.0,
    }
    if values["nnodes"] > 1:
        values.update(master_addr=os.environ["MASTER_ADDR"], master_port=int(os.environ["MASTER_PORT"]))
    values.update(changes)
    if per_node:
        values.update(per_node[node_rank])
    return launch_job(JobSpec(**values))


def launch(
    world: World,
    script: str,
    *,
    num_nodes: int = 1,
    per_node: list[dict[str, Any]] | None = None,
    hosts: list[Host] | None = None,
    env: dict[str, str] | None = None,
    **changes: Any,
) -> list[Outcome]:
    """Run a job on `num_nodes` launchers: how each of them ended, its value being the exit code of the job."""
    return world.outcomes(
        be_launcher,
        script,
        changes,
        per_node or [],
        num_ranks=num_nodes,
        backend=None,
        timeout_s=40,
        env=env or {},
        hosts=hosts or [],
    )


def still_running(folder: Path, *, timeout_s: float = 10.0) -> list[str]:
    """Commands that name the folder and still run at the deadline; empty as soon as there are none."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = []
        for path in Path("/proc").iterdir():
            if not path.name.isdigit() or int(path.name) == os.getpid():
                continue
            try:
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in command:
                found.append(f"{path.name}: {command}")
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)
