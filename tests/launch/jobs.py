"""Jobs for tests: launchers in processes of their own, workers that are tiny scripts without torch.

A launcher is a rank of the `world` fixture (forked, so torch need not be imported again) that calls
`launch_job`; one rank per node. Scripts start with PROLOGUE and act on their launcher through its pid.
"""

from __future__ import annotations

import os
import select
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
import os, select, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
launcher = os.getppid()
folder = os.path.dirname(os.path.abspath(__file__))
def wait_for(*names, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not all(os.path.exists(os.path.join(folder, name)) for name in names):
        assert time.monotonic() < deadline, f"{names} did not appear"
        time.sleep(0.005)
def leave(name, text=""):
    path = os.path.join(folder, name)
    with open(path + ".part", "w") as file:
        file.write(text)
    os.rename(path + ".part", path)
def stay():
    # For scripts with handlers: signal.pause() sleeps through a signal that comes just before it.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    while True:
        select.select([reading], [], [])
        os.read(reading, 64)
"""


def write_script(folder: Path, *parts: str) -> str:
    """A worker's script: PROLOGUE, then the parts, each with its own indentation taken away."""
    path = folder / "worker.py"
    path.write_text(PROLOGUE + "".join(map(textwrap.dedent, parts)))
    return str(path)


def be_launcher(script: str, num_nodes: int, changes: dict[str, Any], per_node: list[dict[str, Any]]) -> int:
    """Runs on a rank of the world: the launcher of one node; returns the job's exit code."""
    node_rank = int(os.environ["RANK"])
    (Path(script).parent / f"launcher-{node_rank}").write_text(str(os.getpid()))
    values: dict[str, Any] = {
        "entry": Entry(target=script),
        "nproc_per_node": 2,
        "nnodes": num_nodes,
        "node_rank": node_rank,
        "join_timeout_s": 60.0,
        "token": "the secret of a test",
    }
    if num_nodes > 1:
        values.update(master_addr=os.environ["MASTER_ADDR"], master_port=int(os.environ["MASTER_PORT"]))
    values.update(changes)
    if per_node:
        values.update(per_node[node_rank])
    return launch_job(JobSpec(**values))


def observe(script: str, num_nodes: int) -> list[str]:
    """Runs on the last rank of the world: what still runs of a job when its launchers are gone.

    Why a rank: once all ranks have ended, the test bed itself collects what they left behind.
    """
    folder = Path(script).parent
    for node_rank in range(num_nodes):
        pid = int(wait_for_text(folder / f"launcher-{node_rank}"))
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([pidfd], [], [], 90)[0], f"the launcher of node {node_rank} does not end"
        os.close(pidfd)
    # A launcher that was killed cannot clean up; its guardian needs a moment.
    return still_running(folder, timeout_s=5.0)


def wait_for_text(path: Path, timeout_s: float = 60.0) -> str:
    """What the file says, once it is there."""
    deadline = time.monotonic() + timeout_s
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.005)
    return path.read_text()


def launch_or_observe(script: str, num_nodes: int, changes: dict[str, Any], per_node: list[dict[str, Any]]) -> Any:
    """Runs on every rank: one launcher per node, then the observer."""
    if int(os.environ["RANK"]) < num_nodes:
        return be_launcher(script, num_nodes, changes, per_node)
    return observe(script, num_nodes)


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
    """Run a job on `num_nodes` launchers: how each of them ended, its value being the exit code of the job.

    In any case nothing of the job may be left running.
    """
    *outcomes, observed = world.outcomes(
        launch_or_observe,
        script,
        num_nodes,
        changes,
        per_node or [],
        num_ranks=num_nodes + 1,
        backend=None,
        timeout_s=100,
        env=env or {},
        hosts=[*hosts, hosts[0]] if hosts else [],
    )
    assert observed.is_ok, observed.trace or observed.stacks
    assert observed.value == [], [outcome.output for outcome in outcomes]
    return outcomes


def still_running(folder: Path, *, timeout_s: float) -> list[str]:
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
