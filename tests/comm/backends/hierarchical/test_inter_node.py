"""Packing between two nodes: on where both ends find the link slow, and never seen in a result."""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.world import World
from tests.chaos.faults import mark, wait_for_mark
from tests.comm.backends.hierarchical.test_wire import start, stop
from torsh_distributed import events
from torsh_distributed.comm.backends.hierarchical import inter_node
from torsh_distributed.comm.backends.hierarchical.inter_node import Packing
from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.errors import CommunicationError, TorshError

needs_core = pytest.mark.needs_core
NUMEL = 700_001  # several pieces, none of them a whole number of blocks


class Core:
    """What a decision needs of the compiled core."""

    def __init__(self, version: int) -> None:
        self.VERSION = version


def ends(rates: tuple[float, float], versions: tuple[int, int]) -> list[Packing]:
    """Two ends that have seen these bytes per second, after they have agreed."""
    found = [Packing(Core(version) if version else None) for version in versions]
    for end, rate in zip(found, rates, strict=True):
        is_time = [end.timed(num_bytes, 1.0) for num_bytes in (10, int(rate), 20, 10**12)]
        assert is_time == [False, False, True, False]
    seen = [end.seen() for end in found]
    for end, other in zip(found, reversed(seen), strict=True):
        end.agree(other)
    return found


@pytest.mark.parametrize(
    ("rates", "versions", "is_on"),
    [
        ((60e6, 60e6), (7, 7), True),
        ((1e6, 900e6), (7, 7), False),  # the first end waited for the second
        ((60e6, 60e6), (7, 8), False),
        ((60e6, 60e6), (0, 7), False),
        ((60e6, 60e6), (0, 0), False),
    ],
)
def test_both_ends_decide_alike(rates: tuple[float, float], versions: tuple[int, int], is_on: bool) -> None:
    for end in ends(rates, versions):
        assert end.packs(torch.empty(2**16)) is is_on
        assert not end.packs(torch.empty(2**16, dtype=torch.float64))
        assert not end.packs(torch.empty(100))


def begin(nodes: str) -> list[tuple[str, str]]:
    """A world on which every link counts as slow, past the all-reduces that are timed; returns what was decided."""
    inter_node._SLOW_BYTES_PER_S = float("inf")
    decisions = []
    unsubscribe = events.subscribe(
        lambda event: (
            decisions.append((event.subject, event.choice)) if isinstance(event, events.DecisionEvent) else None
        )
    )
    start(nodes)
    for _ in range(inter_node._NUM_TIMED):
        dist.all_reduce(torch.zeros(NUMEL))
    unsubscribe()
    return decisions


def values_of(rank: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(NUMEL, generator=generator)
    noise = torch.randint(-(2**31), 2**31, (NUMEL,), generator=generator).to(torch.int32).view(torch.float32)
    if kind == "noise":
        return noise
    if kind == "mixed":
        values[NUMEL // 3 : NUMEL // 2] = noise[NUMEL // 3 : NUMEL // 2]
    return values


def reduce_packed(nodes: str) -> tuple[list[tuple[str, str]], int]:
    decisions = begin(nodes)
    rank, size = dist.get_rank(), dist.get_world_size()
    num_packed = 0

    def counted(self: Packing, buffer: Tensor) -> Tensor:
        nonlocal num_packed
        num_packed += 1
        return pack(self, buffer)

    pack = Packing.pack
    with patch.object(Packing, "pack", counted):
        for kind in ("normal", "noise", "mixed"):
            buffer = values_of(rank, kind)
            work = dist.all_reduce(buffer, async_op=True)
            work.wait()
            parts = [values_of(other, kind) for other in range(size)]
            by_node = [[part for part, at in zip(parts, nodes, strict=True) if at == node] for node in "ab"]
            expected = torch.add(*(functools.reduce(torch.add, of_node) for of_node in by_node))
            if size == 2:
                assert torch.equal(buffer.view(torch.int32), expected.view(torch.int32)), kind
            else:
                assert torch.equal(buffer.nan_to_num(), expected.nan_to_num()), kind
        largest, mean, whole = (
            values_of(rank, "normal"),
            values_of(rank, "normal"),
            torch.ones(NUMEL, dtype=torch.int32),
        )
        parts = [values_of(other, "normal") for other in range(size)]
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        assert torch.equal(largest, torch.stack(parts).amax(0))
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(mean, torch.stack(parts).mean(0))
        before = num_packed
        dist.all_reduce(whole)
        assert whole.unique().tolist() == [size]
        assert num_packed == before, "integers are sent as they are"
    stop()
    return decisions, num_packed


@needs_core
@pytest.mark.parametrize("nodes", ["ab", "aabb", "abb"])
def test_packed_sums_have_the_bits_of_plain_ones(world: World, nodes: str) -> None:
    results = world.run(reduce_packed, nodes, num_ranks=len(nodes), backend=None, timeout_s=60)
    for rank, (decisions, num_packed) in enumerate(results):
        carries_a_shard = nodes != "abb" or rank < 2
        assert decisions == ([("packing between nodes", "on")] if carries_a_shard else [])
        assert (num_packed > 0) is carries_a_shard


def reduce_unpacked() -> list[tuple[str, str]]:
    """Three nodes have no pairs, so nothing is timed; results are as ever."""
    decisions = begin("abc")
    buffer = torch.ones(NUMEL)
    dist.all_reduce(buffer)
    assert buffer.unique().tolist() == [3.0]
    stop()
    return decisions


@needs_core
def test_three_nodes_do_not_pack(world: World) -> None:
    assert world.run(reduce_unpacked, num_ranks=3, backend=None) == [[], [], []]


def of_two_sizes() -> str:
    begin("ab")
    with pytest.raises(TorshError) as caught:
        dist.all_reduce(torch.randn(NUMEL - 20_000 * dist.get_rank()))
    return str(caught.value)


@needs_core
def test_another_size_on_the_other_node_is_told(world: World) -> None:
    # By the first rank that sees it; the other may only see that one leave.
    said = world.run(of_two_sizes, num_ranks=2, backend=None)
    assert any("has another size on the other node" in one for one in said), said


def lose_a_rank(is_killed: bool, folder: Path) -> str:
    """Rank 1 stops at its third packed piece: it is killed, or only late, and rank 0 aborts.

    One that is late stays so until rank 0 is released, which has half an hour to wait.
    """
    begin("ab")
    num_packed = 0
    pack = Packing.pack

    def stopping(self: Packing, buffer: Tensor) -> Tensor:
        nonlocal num_packed
        num_packed += 1
        if num_packed == 3 and is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if num_packed == 3:
            wait_for_mark(folder, rank=0, step=1)
        return pack(self, buffer)

    if dist.get_rank() == 1:
        with patch.object(Packing, "pack", stopping), pytest.raises(TorshError):
            dist.all_reduce(torch.randn(NUMEL))
        return "late"
    timer = threading.Timer(0.5, abort, args=["enough"])
    if not is_killed:
        timer.start()
    with pytest.raises(CommunicationError) as caught:
        dist.all_reduce(torch.randn(NUMEL))
    mark(folder, step=1)
    if not is_killed:
        timer.join()
    return str(caught.value)


@needs_core
def test_a_peer_that_dies_half_way_is_an_error_between_nodes(world: World, tmp_path: Path) -> None:
    alive, dead = world.outcomes(lose_a_rank, True, tmp_path, num_ranks=2, backend=None)
    assert dead.exit_code == -signal.SIGKILL
    assert "failed between the nodes" in alive.value


@needs_core
def test_abort_releases_a_packed_all_reduce(world: World, tmp_path: Path) -> None:
    message, late = world.run(lose_a_rank, False, tmp_path, num_ranks=2, backend=None)
    assert "the group was aborted: enough" in message
    assert late == "late"
