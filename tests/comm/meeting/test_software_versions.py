"""Versions of the nodes of a job: what differs is named, what may differ is not."""

from __future__ import annotations

import platform

import torch

from torsh_distributed.comm.meeting.software_versions import NodeSoftware, own_software, software_differences

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
