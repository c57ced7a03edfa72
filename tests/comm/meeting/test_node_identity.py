"""A node is where ranks can map each other's memory, for every part that asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.ports import free_port
from torsh_distributed.comm.meeting.node_identity import node_identity, pack_nodes, unpack_nodes

pytestmark = pytest.mark.ranks

_JOIN = """
import json
import os
import torch
import torsh_distributed as td
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.comm.groups.process_group import local_world_size

said = {}
try:
    td.init(backend="shm", timeout_s=60)
except InvalidArgument as error:
    said["error"] = str(error)
os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]  # rank 0 may not have closed the first store yet
td.init(backend="torsh", timeout_s=60)
total = torch.full((300_000,), float(td.rank() + 1))
td.all_reduce(total)
print(json.dumps({**said, "total": total.unique().tolist(), "local_world_size": local_world_size()}))
td.destroy_process_group()
"""


def _join(command: list[str]) -> list[dict[str, Any]]:
    """What two ranks print, each started by `command`, which puts it where it belongs."""
    places = [{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} for rank in range(2)]
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SECOND_PORT": str(free_port())}
    script = [*command, sys.executable, "-c", _JOIN]
    ranks = [
        subprocess.Popen(script, env={**os.environ, **master, **place}, stdout=subprocess.PIPE, text=True)
        for place in places
    ]
    try:
        return [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


_OWN_PIDS = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def test_one_process_has_one_identity() -> None:
    assert node_identity() == node_identity()


@pytest.mark.needs_netns
def test_ranks_in_different_process_namespaces_are_different_nodes() -> None:
    """Containers that share network and IPC but not process ids: the default backend works there, through gloo.

    Shared memory does not, and its refusal names a backend that does.
    """
    for rank in _join(_OWN_PIDS):
        assert "some are elsewhere" in rank["error"]
        assert "backend='torsh'" in rank["error"]
        assert (rank["total"], rank["local_world_size"]) == ([3.0], 1)


@given(nodes=st.lists(st.sampled_from("abcdef"), max_size=40))
def test_ranks_share_a_node_after_unpacking_if_they_did_before(nodes: list[str]) -> None:
    order = list(dict.fromkeys(nodes))
    assert unpack_nodes(pack_nodes(nodes)) == tuple(order.index(node) for node in nodes)


def test_ten_thousand_ranks_in_a_pattern_take_few_bytes() -> None:
    node_by_node = [f"node {rank // 8}" for rank in range(10_000)]
    in_turn = [f"node {rank % 1250}" for rank in range(10_000)]
    assert max(len(pack_nodes(nodes)) for nodes in (node_by_node, in_turn)) < 300
