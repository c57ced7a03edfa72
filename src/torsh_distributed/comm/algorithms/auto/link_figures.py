"""Measure what messages cost between the ranks of a group, and agree on the numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import astuple

import torch
import torch.distributed as dist

from torsh_distributed.comm.algorithms.base import Link, LinkFigures
from torsh_distributed.comm.algorithms.channel import Lane
from torsh_distributed.comm.algorithms.hierarchical import by_node, node_of_ranks
from torsh_distributed.comm.algorithms.running import new_lane
from torsh_distributed.errors import BackendNotInitialized

_SMALL_BYTES = 256
_LARGE_BYTES = 4 * 2**20
_NUM_MESSAGES = 8
_NO_LINK = Link(0.0, 0.0, 0.0)


def measure_links(group: dist.ProcessGroup) -> LinkFigures:
    """Time small and large messages between neighbours, all at once; every rank of the group calls this.

    All ranks get the same figures: each is the largest that any rank saw, for an all-reduce is as slow as its slowest
    link. Takes some forty exchanges.
    """
    lane = new_lane(group)
    nodes = _known_nodes(group)
    flat, fold_byte_s = _measure(lane), _measure_fold()
    near = far = _NO_LINK
    if len(nodes) > 1:
        mine = next(members for members in nodes if lane.position in members)
        near = _measure(lane.select(mine))
        here = mine.index(lane.position)
        far = _measure(lane.select([members[here] for members in nodes if here < len(members)]))
    seen = torch.tensor([*astuple(flat), *astuple(near), *astuple(far), fold_byte_s], dtype=torch.float64)
    dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
    agreed = seen.tolist()
    is_layered = len(nodes) > 1
    return LinkFigures(
        num_ranks=group.size(),
        flat=Link(*agreed[0:3]),
        fold_byte_s=agreed[9],
        node_sizes=tuple(map(len, nodes)),
        near=Link(*agreed[3:6]) if is_layered else None,
        far=Link(*agreed[6:9]) if is_layered else None,
    )


def _known_nodes(group: dist.ProcessGroup) -> list[list[int]]:
    """Positions by node; empty where the group was not brought up by us, and nothing is known."""
    try:
        return by_node(node_of_ranks(group))
    except BackendNotInitialized:
        return []


def _measure(lane: Lane) -> Link:
    """What this rank sees of the ring of a lane; zeros in a lane of one, where nothing travels."""
    if lane.size == 1:
        return _NO_LINK
    small_s = _median_s(10, lambda: _exchange(lane, _SMALL_BYTES, 1))
    many_s = _median_s(5, lambda: _exchange(lane, _SMALL_BYTES, _NUM_MESSAGES))
    large_s = _median_s(3, lambda: _exchange(lane, _LARGE_BYTES, 1))
    return Link(
        latency_s=small_s,
        message_s=max(0.0, many_s - small_s) / (_NUM_MESSAGES - 1),
        byte_s=max(0.0, large_s - small_s) / _LARGE_BYTES,
    )


def _exchange(lane: Lane, num_bytes: int, num_messages: int) -> None:
    """Messages to the next of the ring while as many come from the one before."""
    after, before = (lane.position + 1) % lane.size, (lane.position - 1) % lane.size
    outgoing = torch.zeros(num_bytes, dtype=torch.uint8)
    incoming = [torch.empty_like(outgoing) for _ in range(num_messages)]
    received = [lane.receive(buffer, before) for buffer in incoming]
    sent = [lane.send(outgoing, after) for _ in range(num_messages)]
    lane.wait(*received, *sent)


def _measure_fold() -> float:
    total, incoming = torch.zeros(_LARGE_BYTES // 4), torch.ones(_LARGE_BYTES // 4)
    return _median_s(3, lambda: total.add_(incoming)) / _LARGE_BYTES


def _median_s(num_times: int, body: Callable[[], object]) -> float:
    body()  # the first pays for connections and pages
    taken = []
    for _ in range(num_times):
        started_s = time.perf_counter()
        body()
        taken.append(time.perf_counter() - started_s)
    return statistics.median(taken)
