"""Measure what messages cost between the ranks of a group, and agree on the numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple

import torch
import torch.distributed as dist

from torsh_distributed.comm.algorithms.base import Channel, MeasuredCosts, MessageCost
from torsh_distributed.comm.algorithms.execution import new_channel
from torsh_distributed.comm.algorithms.hierarchical import by_node, node_of_ranks
from torsh_distributed.errors import BackendNotInitialized

_SMALL_BYTES = 256
_LARGE_BYTES = 4 * 2**20
_NUM_MESSAGES = 8
_NO_COST = MessageCost(0.0, 0.0, 0.0)


def measure_costs(group: dist.ProcessGroup) -> MeasuredCosts:
    """Time small and large messages between neighbours, all at once; every rank of the group calls this.

    All ranks get the same costs: each is the largest that any rank saw, because an all-reduce is as slow as its
    slowest link. Takes about forty exchanges.
    """
    channel = new_channel(group)
    nodes = _known_nodes(group)
    flat, fold_byte_s = _measure(channel), _measure_fold()
    near = far = _NO_COST
    if len(nodes) > 1:
        mine = next(members for members in nodes if channel.position in members)
        near = _measure(channel.select(mine))
        here = mine.index(channel.position)
        far = _measure(channel.select([members[here] for members in nodes if here < len(members)]))
    seen = torch.tensor([*astuple(flat), *astuple(near), *astuple(far), fold_byte_s], dtype=torch.float64)
    dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
    agreed = seen.tolist()
    is_layered = len(nodes) > 1
    return MeasuredCosts(
        num_ranks=group.size(),
        flat=MessageCost(*agreed[0:3]),
        fold_byte_s=agreed[9],
        node_sizes=tuple(map(len, nodes)),
        near=MessageCost(*agreed[3:6]) if is_layered else None,
        far=MessageCost(*agreed[6:9]) if is_layered else None,
    )


def _known_nodes(group: dist.ProcessGroup) -> list[list[int]]:
    """Positions by node; empty if the group was not brought up by `init()`, so nodes are unknown."""
    try:
        return by_node(node_of_ranks(group))
    except BackendNotInitialized:
        return []


def _measure(channel: Channel) -> MessageCost:
    """What this rank sees of the ring of a channel; zeros in a channel of one rank, where nothing travels."""
    if channel.size == 1:
        return _NO_COST
    small_s = _least_s(10, lambda: _exchange(channel, _SMALL_BYTES, 1))
    many_s = _least_s(5, lambda: _exchange(channel, _SMALL_BYTES, _NUM_MESSAGES))
    large_s = _least_s(3, lambda: _exchange(channel, _LARGE_BYTES, 1))
    return MessageCost(
        latency_s=small_s,
        message_s=max(0.0, many_s - small_s) / (_NUM_MESSAGES - 1),
        byte_s=max(0.0, large_s - small_s) / _LARGE_BYTES,
    )


def _exchange(channel: Channel, num_bytes: int, num_messages: int) -> None:
    """Send messages to the next rank of the ring while as many arrive from the previous."""
    after, before = (channel.position + 1) % channel.size, (channel.position - 1) % channel.size
    outgoing = torch.zeros(num_bytes, dtype=torch.uint8)
    incoming = [torch.empty_like(outgoing) for _ in range(num_messages)]
    received = [channel.receive(buffer, before) for buffer in incoming]
    sent = [channel.send(outgoing, after) for _ in range(num_messages)]
    channel.wait(*received, *sent)


def _measure_fold() -> float:
    total, incoming = torch.zeros(_LARGE_BYTES // 4), torch.ones(_LARGE_BYTES // 4)
    return _least_s(3, lambda: total.add_(incoming)) / _LARGE_BYTES


def _least_s(num_times: int, body: Callable[[], object]) -> float:
    body()  # the first call pays for connections and pages
    taken = []
    for _ in range(num_times):
        started_s = time.perf_counter()
        body()
        taken.append(time.perf_counter() - started_s)
    return min(taken)  # the rest is what else the machine was doing
