"""Tensors in memory that all ranks have: the same results as without, however ranks hold on to them."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.world import World
from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.shm import ShmOptions
from torsh_distributed.comm.backends.shm.segment import SharedSegment
from torsh_distributed.comm.backends.wire import BufferUse
from torsh_distributed.comm.collectives.moves import all_to_all_single
from torsh_distributed.comm.shared_memory.buffers import (
    allocate_shared_memory,
    collective_buffer,
    gather_to_all,
    new_rows,
    sum_from_all,
    takes_rows,
)
from torsh_distributed.errors import BackendError, MemoryAllocationFailed, TensorShapeMismatch
from torsh_distributed.parallel.sharded.communication import gather, reduce_scatter

NUMEL = 1000
USES: tuple[BufferUse, ...] = ("shared", "per_rank")


def _value(rank: int, turn: int) -> Tensor:
    return torch.arange(NUMEL, dtype=torch.float32) + 1000 * rank + 7 * turn


def _gather(turn: int, group: dist.ProcessGroup, *, use_common: bool) -> tuple[Tensor, bool]:
    """The output, and whether it lies in common memory."""
    rank, num_ranks = group.rank(), group.size()
    shared = collective_buffer(NUMEL * num_ranks, torch.float32, group, "shared") if use_common else None
    output = torch.empty(NUMEL * num_ranks) if shared is None else shared
    part = output[NUMEL * rank : NUMEL * (rank + 1)]
    part.copy_(_value(rank, turn))
    gather(output, part, group=group)
    return output, shared is not None


def _scatter(turn: int, group: dist.ProcessGroup, *, use_common: bool) -> tuple[Tensor, bool]:
    rank, num_ranks = group.rank(), group.size()
    shared = collective_buffer(NUMEL * num_ranks, torch.float32, group, "per_rank") if use_common else None
    source = torch.empty(NUMEL * num_ranks) if shared is None else shared
    for owner in range(num_ranks):
        source[NUMEL * owner : NUMEL * (owner + 1)] = _value(rank, turn) * (owner + 1)
    output = torch.empty(NUMEL)
    reduce_scatter(output, source, group=group)
    return output, shared is not None


def gathers(kind: str) -> list[tuple[bool, bool]]:
    """By turn: whether the result is right, and whether it lay in common memory; runs on every rank."""
    group = dist.group.WORLD
    assert group is not None
    rank, num_ranks = group.rank(), group.size()
    expected_gather = [torch.cat([_value(r, turn) for r in range(num_ranks)]) for turn in range(20)]
    expected_scatter = [sum(_value(r, turn) for r in range(num_ranks)) * (rank + 1) for turn in range(20)]
    seen, is_kept = [], []
    holds = {"plain": 1, "one rank never": 1, "held by one": 20}.get(kind, 6)
    held: deque[tuple[int, Tensor]] = deque()
    for turn in range(20):
        is_mine = kind != "one rank never" or rank != 1
        if kind == "counts differ" and rank == 0 and turn == 5:
            for use in USES:
                collective_buffer(NUMEL * num_ranks, torch.float32, group, use)  # asked for, and never used
        output, was_common = _gather(turn, group, use_common=is_mine)
        is_right = torch.equal(output, expected_gather[turn])
        folded, was_scattered = _scatter(turn, group, use_common=is_mine)
        assert torch.allclose(folded, torch.as_tensor(expected_scatter[turn]))
        seen.append((is_right, was_common and was_scattered))
        held.append((turn, output))
        while len(held) > (holds if rank == num_ranks - 1 else 1):  # the others are well into later turns by then
            is_kept.append(_is_as_gathered(held.popleft(), expected_gather))
    is_kept += [_is_as_gathered(one, expected_gather) for one in held]
    return [(is_right and all(is_kept), was_common) for is_right, was_common in seen]


def _is_as_gathered(one: tuple[int, Tensor], expected: list[Tensor]) -> bool:
    turn, output = one
    return torch.equal(output, expected[turn])


@pytest.mark.needs_core
@pytest.mark.parametrize("backend", ["shm", "torsh"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_ranks_share_is_what_they_would_have_got(world: World, num_ranks: int, backend: str) -> None:
    for seen in world.run(gathers, "plain", num_ranks=num_ranks, backend=backend):
        assert seen == [(True, True)] * 20


def test_a_rank_that_holds_on_for_some_turns_never_sees_what_comes_later(world: World) -> None:
    for seen in world.run(gathers, "held for some turns", num_ranks=3, backend="shm"):
        assert all(is_right for is_right, _ in seen)


@pytest.mark.needs_core
def test_what_one_rank_holds_on_to_stays_as_it_is_and_stops_nobody(world: World) -> None:
    for seen in world.run(gathers, "held by one", num_ranks=2, backend="shm"):
        assert all(is_right for is_right, _ in seen)
        assert [was_common for _, was_common in seen][:4] == [True] * 4
        assert not any(was_common for _, was_common in seen[8:]), "the slots are taken"


def test_one_rank_without_it_is_no_harm(world: World) -> None:
    results = world.run(gathers, "one rank never", num_ranks=3, backend="shm")
    for seen in results:
        assert all(is_right for is_right, _ in seen)
    assert not any(was_common for _, was_common in results[1])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_count_differently_do_not_write_into_each_others_buffers(world: World, num_ranks: int) -> None:
    for seen in world.run(gathers, "counts differ", num_ranks=num_ranks, backend="shm"):
        assert all(is_right for is_right, _ in seen)


def odd_requests() -> list[str]:
    group = dist.group.WORLD
    assert isinstance(group, TorshProcessGroup)
    found = []
    for use in USES:
        found += [str(collective_buffer(numel, torch.float32, group, use) is None) for numel in (0, 2**40)]
    kept = collective_buffer(8, torch.float64, group, "shared")
    assert kept is not None
    kept.fill_(3.5)
    dist.destroy_process_group()
    assert collective_buffer(2**20, torch.float32, group, "shared") is None, "the group has ended"
    return [*found, str(kept.sum().item())]  # its memory outlives the group


@pytest.mark.needs_core
def test_nothing_and_too_much_are_refused_and_a_tensor_outlives_its_group(world: World) -> None:
    for found in world.run(odd_requests, backend="shm"):
        assert found == ["True"] * 4 + ["28.0"]


def without_common() -> bool:
    group = dist.group.WORLD
    assert group is not None
    return collective_buffer(8, torch.float32, group, "shared") is None


def test_gloo_has_no_common_memory(world: World) -> None:
    assert world.run(without_common, backend="gloo") == [True, True]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def write_and_read() -> tuple[list[int], bool, bool]:
    """What each rank finds where all have written; whether nothing is nothing; whether tensors outlive the group."""
    group = _world()
    memory = allocate_shared_memory(3 * group.size(), group)
    assert memory is not None
    view = torch.frombuffer(memory, dtype=torch.uint8)
    view[3 * group.rank() : 3 * group.rank() + 3] = group.rank() + 1
    dist.barrier()
    found = view.tolist()
    is_none = allocate_shared_memory(0, group) is None
    del memory
    dist.destroy_process_group()
    return found, is_none, view.tolist() == found


@pytest.mark.parametrize("backend", ["shm", "torsh"])
def test_all_ranks_have_the_same_memory_for_as_long_as_they_point_into_it(world: World, backend: str) -> None:
    for found in world.run(write_and_read, num_ranks=3, backend=backend):
        assert found == ([1] * 3 + [2] * 3 + [3] * 3, True, True)


def no_memory(*_: object, **__: object) -> NoReturn:
    raise MemoryAllocationFailed("there is no memory for a shared segment: test", hint="none", requested_bytes=1)


def no_access(*_: object, **__: object) -> NoReturn:
    raise BackendError("rank 0's shared memory cannot be opened: test", hint="none", backend="shm")


def no_files(*_: object, **__: object) -> NoReturn:
    raise OSError(24, "Too many open files")


FAULTS: list[tuple[int, str, Callable[..., NoReturn], str]] = [
    (0, "create", no_memory, "there is no memory for a shared segment"),
    (0, "create", no_files, "Too many open files"),
    (1, "open", no_access, "rank 0's shared memory cannot be opened"),
    (2, "open", no_files, "Too many open files"),
]
"""The rank on which it fails, where, how, and what all are told."""


def fail_in_turn() -> list[tuple[bool, list[str]]]:
    """By fault: whether this rank got nothing, and the warnings it gave; then once more without one."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment]
    logging.getLogger("torsh_distributed.comm.shared_memory.buffers").addHandler(handler)
    found = []
    for rank, name, fails, _ in FAULTS:
        records.clear()
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == rank:
                patch.setattr(SharedSegment, name, fails)
            is_none = allocate_shared_memory(64, _world()) is None
        found.append((is_none, [f"{one.levelname} {one.getMessage()}" for one in records]))
    assert allocate_shared_memory(64, _world()) is not None
    return found


def test_what_one_rank_cannot_have_no_rank_gets_and_all_say_why(world: World) -> None:
    for found in world.run(fail_in_turn, num_ranks=3, backend="shm"):
        for (is_none, texts), (*_, reason) in zip(found, FAULTS, strict=True):
            assert is_none
            assert len(texts) == 1
            assert texts[0].startswith("WARNING the ranks of this node cannot share memory for parameters: ")
            assert reason in texts[0]
            assert "\n" not in texts[0]


def no_sharing() -> bool:
    return allocate_shared_memory(64, _world()) is None


def test_gloo_has_no_memory_to_share(world: World) -> None:
    assert world.run(no_sharing, backend="gloo") == [True, True]


SHAPES = [(1, 1), (7, 3), (40, 33), (300, 512), (64, 4096)]
"""Rows and their width: odd ones, some of no whole cache line, and more than fit a slot at once."""


def exchange_both_ways() -> None:
    """Runs on every rank, against torch's index_select and index_add around a plain all-to-all."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()
    for seed, (num_rows, width) in enumerate(SHAPES):
        drawn = torch.Generator().manual_seed(seed)
        # (from, to): every rank draws the same table; some pairs exchange nothing.
        counts = torch.randint(0, 2 * num_rows, (size, size), generator=drawn) * torch.randint(
            0, 2, (size, size), generator=drawn
        )
        send, receive = counts[rank].tolist(), counts[:, rank].tolist()
        mine = torch.Generator().manual_seed(100 * seed + rank)
        source = torch.randn(num_rows, width, generator=mine)
        assert takes_rows(source, group)
        sent = torch.randint(0, num_rows, (sum(send),), generator=mine)
        arrived = gather_to_all(source, sent, send, receive, group=group)
        assert torch.equal(arrived, all_to_all_single(source[sent], send, receive, group=group))
        weights = torch.rand(sum(send), generator=mine)
        plain = all_to_all_single(arrived, receive, send, group=group)
        for factors in (None, weights):
            home = sum_from_all(arrived, sent, receive, send, num_rows=num_rows + 2, group=group, weights=factors)
            weighed = plain if factors is None else plain * factors.unsqueeze(1)
            expected = torch.zeros(num_rows + 2, width).index_add_(0, sent, weighed)
            torch.testing.assert_close(home, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.needs_core
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_rows_come_as_if_sorted_sent_and_added_up_apart(world: World, num_ranks: int) -> None:
    world.run(exchange_both_ways, num_ranks=num_ranks, backend="shm", timeout_s=60)


def hold_and_overwrite() -> tuple[int, int]:
    """Ranks hold what came for a while, and overwrite what they sent at once. Counts common outputs and sources."""
    group = dist.group.WORLD
    assert isinstance(group, TorshProcessGroup)
    rank, size = group.rank(), group.size()
    held: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
    num_common = [0, 0]
    for turn in range(16):
        drawn = torch.Generator().manual_seed(turn)
        counts = torch.randint(0, 600, (size, size), generator=drawn)
        if turn % 4 == 3:
            counts[:, -1] = 0  # the last rank has nothing to put anywhere: all do without
        send, receive = counts[rank].tolist(), counts[:, rank].tolist()
        mine = torch.Generator().manual_seed(100 * turn + rank)
        source = torch.randn(200, 65, generator=mine)
        sent = torch.randint(0, 200, (sum(send),), generator=mine)
        expected = all_to_all_single(source[sent], send, receive, group=group)
        arrived = gather_to_all(source, sent, send, receive, group=group)
        source.fill_(math.nan)
        assert torch.equal(arrived, expected)
        num_common[0] += _is_common(arrived)
        held.append((arrived, expected))
        while len(held) > 1 + 2 * rank:  # rank 0 lets go at once, others later and later
            assert torch.equal(*held.popleft())
        made = new_rows(sum(receive), 65, source, group).copy_(expected)
        num_common[1] += _is_common(made)
        from_made = sum_from_all(made, sent, receive, send, num_rows=200, group=group)
        made.fill_(math.nan)
        from_plain = sum_from_all(expected.clone(), sent, receive, send, num_rows=200, group=group)
        assert torch.equal(from_made, from_plain), "added up in the same order, wherever they lie"
    assert all(torch.equal(*pair) for pair in held)
    return num_common[0], num_common[1]


def _is_common(tensor: torch.Tensor) -> bool:
    """What torch allocates can be made larger; memory that it was given cannot."""
    return not tensor.untyped_storage().resizable()


@pytest.mark.needs_core
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_common_memory_is_used_where_all_have_it_and_changes_nothing(world: World, num_ranks: int) -> None:
    for outputs, sources in world.run(hold_and_overwrite, num_ranks=num_ranks, backend="shm", timeout_s=60):
        assert 0 < outputs < 16
        assert sources > 0


def refuse() -> None:
    group = dist.group.WORLD
    assert group is not None
    source = torch.ones(4, 8)
    assert not takes_rows(source.double(), group), "float32 alone"
    assert not takes_rows(torch.ones(1, 2**20), group), "longer than a slot"
    index = torch.tensor([0, 1, 2, 4])
    with pytest.raises(TensorShapeMismatch, match="the rows of the source do not match"):
        gather_to_all(source, index, [2, 2], [2, 2], group=group)
    with pytest.raises(TensorShapeMismatch, match="the rows of the output do not match"):
        sum_from_all(source, index, [2, 2], [2, 2], num_rows=4, group=group)
    with pytest.raises(TensorShapeMismatch, match="one weight for each received row"):
        sum_from_all(source, index % 4, [2, 2], [2, 2], num_rows=4, group=group, weights=torch.ones(3))
    portable = dist.new_group(pg_options=ShmOptions(core="portable"))
    assert isinstance(portable, dist.ProcessGroup)
    assert not takes_rows(source, portable), "the portable core leaves it to others"
    # Nothing was sent: the group goes on.
    assert torch.equal(gather_to_all(source, index % 4, [2, 2], [2, 2], group=group), torch.ones(4, 8))


@pytest.mark.needs_core
def test_rows_outside_their_tensor_are_refused_before_anything_is_sent(world: World) -> None:
    world.run(refuse, num_ranks=2, backend="shm")


def differ() -> None:
    group = dist.group.WORLD
    assert group is not None
    width = 8 if group.rank() == 0 else 16
    gather_to_all(torch.ones(2, width), torch.tensor([0, 1]), [1, 1], [1, 1], group=group)


@pytest.mark.needs_core
def test_ranks_with_rows_of_other_widths_are_told(world: World) -> None:
    outcomes = world.outcomes(differ, num_ranks=2, backend="shm")
    assert all("all_to_all" in str(outcome.error) for outcome in outcomes), [outcome.error for outcome in outcomes]
