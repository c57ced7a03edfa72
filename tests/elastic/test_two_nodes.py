"""Elastic jobs on two machines of the lab: a link that goes down, one that gets slow, a network that falls apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.faults import wait_for_mark
from tests.elastic.jobs import ROOT, SCRIPT, ElasticOutcome
from tests.elastic.test_in_place import check_as_undisturbed
from tests.lab.network import Host, Lab

pytestmark = [pytest.mark.matrix, pytest.mark.needs_netns, pytest.mark.ranks]

NUM_STEPS = 120


def start_on(hosts: list[Host], folder: Path, *options: str) -> list[subprocess.Popen[str]]:
    """A job of two workers on each host, with steps of 20 ms."""
    (folder / "slow").touch()
    (folder / "token").write_text("the secret of a test")
    (folder / "token").chmod(0o600)
    base = [sys.executable, "-m", "torsh_distributed.run", "--elastic", "--nproc-per-node", "2", "--nnodes", "2"]
    base += ["--master-addr", hosts[0].address, "--master-port", "29600", "--token-file", str(folder / "token")]
    return [
        host.popen(
            [*base, "--node-rank", str(rank), *options, str(SCRIPT), str(folder), str(NUM_STEPS), "torsh"],
            env={"PYTHONPATH": str(ROOT), "TORSH_EVENTS_DIR": str(folder / "events"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank, host in enumerate(hosts)
    ]


def ends(jobs: list[subprocess.Popen[str]], folder: Path) -> list[ElasticOutcome]:
    """How the launchers end."""
    found = []
    for job in jobs:
        output, _ = job.communicate(timeout=90)
        found.append(ElasticOutcome(job.returncode, output, folder, 0.0))
    return found


def decisions(folder: Path) -> list[dict[str, Any]]:
    """What node 0's launcher recorded of losses and health, in the order of time."""
    lines = [line for path in (folder / "events").glob("*.jsonl") for line in path.read_text().splitlines()]
    records = sorted((json.loads(line) for line in lines), key=lambda one: float(one["time"]))
    return [one for one in records if one["type"] == "membership" and one["action"] in ("lost", "health", "recovered")]


@pytest.mark.parametrize("how", ["link", "partition"])
def test_of_two_halves_the_one_with_node_0_goes_on(lab: Lab, tmp_path: Path, how: str) -> None:
    hosts = lab.hosts(2)
    jobs = start_on(hosts, tmp_path, "--on-loss", "shrink")
    for rank in range(4):
        wait_for_mark(tmp_path, rank=rank, step=5, within_s=60)
    if how == "link":
        hosts[1].link_down()
    else:
        lab.partition([hosts[0]], [hosts[1]])
    leading, cut_off = ends(jobs, tmp_path)
    check_as_undisturbed(leading, num_steps=NUM_STEPS)
    assert "node 1: its launcher is gone: no sign of life for" in leading.output
    assert "regrouped: 2 workers" in leading.output
    assert sorted(leading.weights()) == [0, 1]
    assert cut_off.code == 1, cut_off.output
    assert "node 0" in cut_off.output
    said = [one["detail"] for one in decisions(tmp_path)]
    noticed = next(number for number, text in enumerate(said) if text.startswith("node 1 is critical: no sign of life"))
    lost = next(number for number, text in enumerate(said) if "its launcher is gone" in text)
    assert noticed < lost, said


def test_the_half_that_goes_on_replaces_what_it_lost(lab: Lab, tmp_path: Path) -> None:
    hosts = lab.hosts(2)
    jobs = start_on(hosts, tmp_path, "--on-loss", "wait")
    wait_for_mark(tmp_path, rank=3, step=5, within_s=60)
    hosts[1].link_down()
    leading, cut_off = ends(jobs, tmp_path)
    check_as_undisturbed(leading, num_steps=NUM_STEPS)
    assert "joined: 4 workers" in leading.output
    assert sorted(leading.weights()) == [0, 1, 4, 5]
    assert cut_off.code == 1, cut_off.output


def test_a_slow_link_is_no_lost_one(lab: Lab, tmp_path: Path) -> None:
    hosts = lab.hosts(2)
    jobs = start_on(hosts, tmp_path)
    wait_for_mark(tmp_path, rank=3, step=5, within_s=60)
    hosts[1].limit(0.002)
    wait_for_mark(tmp_path, rank=3, step=40, within_s=60)
    hosts[1].limit(None)
    for outcome in ends(jobs, tmp_path):
        check_as_undisturbed(outcome, num_steps=NUM_STEPS)
        assert "lost" not in outcome.output
