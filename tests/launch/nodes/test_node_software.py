"""Versions of the nodes of a job: what differs is named, what may differ is not."""

from __future__ import annotations

import dataclasses
import platform

import torch

from torsh_distributed.launch.nodes.launcher_listener import disagreement
from torsh_distributed.launch.nodes.node_software import NodeSoftware, own_software, software_differences
from torsh_distributed.launch.nodes.records import JoinRequest
from torsh_distributed.launch.spec import Entry, JobSpec

OURS = NodeSoftware(python="3.11.2", torch="2.13.0+cpu", torsh="0.1.0")


def test_this_nodes_versions_are_read_without_importing_them() -> None:
    found = own_software()
    assert found.python == platform.python_version()
    assert found.torch.partition("+")[0] == torch.__version__.partition("+")[0]
    assert found.torsh


def test_patch_levels_of_python_and_builds_of_torch_may_differ() -> None:
    assert software_differences(OURS, NodeSoftware(python="3.11.9", torch="2.13.0+cu128", torsh="0.1.0")) == []


def test_what_differs_is_named_with_both_values() -> None:
    theirs = NodeSoftware(python="3.12.1", torch="2.12.1", torsh="")
    assert software_differences(OURS, theirs) == [
        "Python is 3.12.1 there and 3.11.2 on node 0",
        "torch is 2.12.1 there and 2.13.0+cpu on node 0",
        "torsh-distributed is not installed there and 0.1.0 on node 0",
    ]


def test_a_node_with_another_torch_is_not_let_in() -> None:
    spec = JobSpec(entry=Entry(target="x.py"), nnodes=2, nproc_per_node=1, run_id="r")
    fitting = JoinRequest(
        node_rank=1,
        node_name="b",
        nnodes=2,
        nproc_per_node=1,
        max_restarts=0,
        run_id="r",
        clock_s=0.0,
        **dataclasses.asdict(own_software()),
    )
    assert disagreement(spec, fitting) is None
    other = disagreement(spec, dataclasses.replace(fitting, torch="1.13.0"))
    assert other == f"torch is 1.13.0 there and {own_software().torch} on node 0"
