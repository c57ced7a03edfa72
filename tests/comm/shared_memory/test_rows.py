"""Rows gathered as they leave and added up as they arrive: the same as sorting, sending and adding up apart."""

from __future__ import annotations

import math
from collections import deque

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.shm import ShmOptions
from torsh_distributed.comm.collectives.moves import all_to_all_single
from torsh_distributed.comm.shared_memory.rows import gather_to_all, new_rows, sum_from_all, takes_rows
from torsh_distributed.errors import TensorShapeMismatch

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
