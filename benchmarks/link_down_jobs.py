"""Elastic jobs on two machines of the network lab, whose link goes down while they train."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos_jobs import NUM_RANKS, SCRIPT
from tests.lab.network import Lab
from torsh_distributed.cli.chaos import chaos_environment
from torsh_distributed.elastic.faults.fault_log import read_fault_log

_BEFORE, _AFTER = 20, 10
_LIMIT_S = 120.0


@dataclass(frozen=True)
class LinkDown:
    """Seconds from the moment that packets stopped."""

    noticed_s: float
    """Until the launcher of node 0 noticed that the other is silent."""
    next_step_s: float
    """Until a step was done that had not begun before."""


def pull_cable(folder: Path, *, work_s: float) -> LinkDown:
    """Start a job on two hosts, cut one off once all ranks train, and see how the other goes on."""
    script, log, events = folder / "train.py", folder / "faults.jsonl", folder / "events"
    folder.mkdir(parents=True)
    script.write_text(SCRIPT)
    (folder / "token").write_text("the secret of a benchmark")
    (folder / "token").chmod(0o600)
    env = {**chaos_environment([], log), "OMP_NUM_THREADS": "1", "TORSH_EVENTS_DIR": str(events)}
    with Lab() as lab, (folder / "output").open("w") as output:
        hosts = lab.hosts(2)
        command = [sys.executable, "-m", "torsh_distributed.run", "--elastic", "--on-loss", "shrink", "--nnodes", "2"]
        command += ["--nproc-per-node", str(NUM_RANKS // 2), "--master-addr", hosts[0].address]
        command += ["--master-port", "29600", "--token-file", str(folder / "token")]
        arguments = [str(script), str(10**6), str(folder / "ckpt"), str(work_s)]
        for rank, host in enumerate(hosts):
            host.popen([*command, "--node-rank", str(rank), *arguments], env=env, stdout=output, stderr=output)
        _await_steps(log, _BEFORE, num_ranks=NUM_RANKS)
        hosts[1].link_down()
        cut_at = time.time()
        newest = max(one["step"] for one in _steps(log))
        try:
            _await_steps(log, newest + _AFTER, num_ranks=1)
        except TimeoutError as error:
            raise RuntimeError((folder / "output").read_text()[-3000:]) from error
        noticed_at = _noticed_at(events)
    done = [one["time"] for one in _steps(log) if one["time"] > cut_at and one["step"] > newest + 1]
    return LinkDown(noticed_at - cut_at, min(done) - cut_at)


def _steps(log: Path) -> list[dict[str, Any]]:
    return [one for one in read_fault_log(log) if one["kind"] == "step"]


def _await_steps(log: Path, step: int, *, num_ranks: int) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while len({one["pid"] for one in _steps(log) if one["step"] >= step}) < num_ranks:
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def _noticed_at(events: Path) -> float:
    """When the launcher of node 0 recorded that node 1 is silent; its events are written every second."""
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        for path in events.glob("launcher-*.jsonl"):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                if str(record.get("detail")).startswith("node 1 is critical"):
                    return float(record["time"])
        time.sleep(0.05)
    raise TimeoutError
