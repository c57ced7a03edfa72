"""The pure parts: trees span, chains do not wait in circles, packs hold every tensor once, estimates order sensibly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.algorithms.auto.choice import shortlist
from torsh_distributed.comm.algorithms.base import MeasuredCosts, MessageCost
from torsh_distributed.comm.algorithms.hierarchical import by_node
from torsh_distributed.comm.algorithms.pipelined import chain_moves
from torsh_distributed.comm.algorithms.registry import ALGORITHMS
from torsh_distributed.comm.algorithms.tree import binomial_branch
from torsh_distributed.comm.collectives.packed import plan_buckets, plan_fused
from torsh_distributed.errors import InvalidArgument

sizes = st.integers(min_value=1, max_value=40)


@given(size=sizes, root=st.integers(min_value=0, max_value=39))
def test_a_binomial_tree_reaches_everyone_within_a_logarithm_of_steps(size: int, root: int) -> None:
    root %= size
    branches = [binomial_branch(position, size, root=root) for position in range(size)]
    assert [position for position, branch in enumerate(branches) if branch.parent is None] == [root]
    for position, branch in enumerate(branches):
        for child in branch.children:
            assert branches[child].parent == position
        depth, above = 0, position
        while (parent := branches[above].parent) is not None:
            above, depth = parent, depth + 1
        assert above == root
        assert depth <= size.bit_length()


@given(size=st.integers(min_value=1, max_value=9), num_chunks=st.integers(min_value=1, max_value=12))
def test_a_chain_never_waits_in_a_circle(size: int, num_chunks: int) -> None:
    """Play the moves of all ranks with messages that wait for their receiver: everybody gets to the end."""
    moves = [list(chain_moves(position, size, num_chunks)) for position in range(size)]
    ups: list[list[int]] = [[] for _ in range(size)]
    downs: list[list[int]] = [[] for _ in range(size)]
    done = [0] * size
    while True:
        before = list(done)
        for here in range(size):
            while done[here] < len(moves[here]):
                move, chunk = moves[here][done[here]]
                inbox = ups if move == "up" else downs
                is_source = here == (0 if move == "up" else size - 1)
                if not is_source:
                    if not inbox[here] or inbox[here][0] != chunk:
                        break
                    inbox[here].pop(0)
                following = here + (1 if move == "up" else -1)
                if 0 <= following < size:
                    inbox[following].append(chunk)
                done[here] += 1
        if done == before:
            break
    assert done == [2 * num_chunks] * size
    assert not any(ups)
    assert not any(downs)


tensors = st.lists(st.tuples(st.integers(min_value=0, max_value=100), st.sampled_from("ab")), max_size=30)


@given(tensors=tensors, limit=st.integers(min_value=1, max_value=120))
def test_buckets_hold_every_tensor_once_and_keep_their_size(tensors: list[tuple[int, str]], limit: int) -> None:
    sizes_bytes, kinds = [size for size, _ in tensors], [kind for _, kind in tensors]
    packs = plan_buckets(sizes_bytes, kinds, bucket_bytes=limit)
    assert sorted(index for pack in packs for index in pack) == list(range(len(tensors)))
    for pack in packs:
        assert len({kinds[index] for index in pack}) == 1
        assert list(pack) == sorted(pack)
        assert len(pack) == 1 or sum(sizes_bytes[index] for index in pack) <= limit


@given(tensors=tensors, threshold=st.integers(min_value=0, max_value=120))
def test_only_tensors_below_the_threshold_are_fused(tensors: list[tuple[int, str]], threshold: int) -> None:
    sizes_bytes, kinds = [size for size, _ in tensors], [kind for _, kind in tensors]
    packs = plan_fused(sizes_bytes, kinds, threshold_bytes=threshold)
    assert sorted(index for pack in packs for index in pack) == list(range(len(tensors)))
    for pack in packs:
        assert len({kinds[index] for index in pack}) == 1
        assert len(pack) == 1 or all(sizes_bytes[index] < threshold for index in pack)
    small = {kind for size, kind in tensors if size < threshold}
    assert sum(sizes_bytes[pack[0]] < threshold for pack in packs) == len(small)


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="bucket_bytes must be above zero"):
        plan_buckets([1], ["a"], bucket_bytes=0)
    with pytest.raises(InvalidArgument, match="threshold_bytes must not be negative"):
        plan_fused([1], ["a"], threshold_bytes=-1)


def test_positions_are_gathered_by_node() -> None:
    assert by_node([4, 4, 7, 4]) == [[0, 1, 3], [2]]


SLOW, FAST = MessageCost(5e-4, 1e-4, 8e-9), MessageCost(5e-6, 2e-6, 2e-10)


def costs(num_ranks: int = 8, **changes: object) -> MeasuredCosts:
    return MeasuredCosts(num_ranks=num_ranks, flat=SLOW, fold_byte_s=1e-10, **changes)  # type: ignore[arg-type]


def test_small_buffers_go_by_few_steps_and_large_ones_by_small_shards() -> None:
    small, large = shortlist(64, costs(64)), shortlist(256 * 2**20, costs(64))
    assert [*small][:2] == ["doubling", "tree"]
    assert not {"doubling", "tree"} & set(large)
    assert {"ring", "reduce_scatter_all_gather"} & large.keys()


def test_a_slow_link_between_nodes_calls_for_hierarchy() -> None:
    layered = costs(8, node_sizes=(4, 4), near=FAST, far=SLOW)
    assert next(iter(shortlist(64 * 2**20, layered))) == "hierarchical"
    assert "hierarchical" not in shortlist(64 * 2**20, costs(8))


@given(num_ranks=st.integers(min_value=2, max_value=300), num_bytes=st.integers(min_value=1, max_value=2**32))
def test_every_estimate_is_above_zero_and_grows_with_the_buffer(num_ranks: int, num_bytes: int) -> None:
    known = costs(num_ranks, node_sizes=(num_ranks - 1, 1), near=FAST, far=SLOW)
    for algorithm in ALGORITHMS.values():
        once, twice = algorithm.estimated_s(num_bytes, known), algorithm.estimated_s(2 * num_bytes, known)
        assert once is not None
        assert twice is not None
        assert 0 < once < twice


@given(num_bytes=st.integers(min_value=1, max_value=2**32))
def test_the_shortlist_is_short_and_deterministic_ones_keep_the_order(num_bytes: int) -> None:
    estimates = shortlist(num_bytes, costs())
    everything = {name for name, one in ALGORITHMS.items() if one.estimated_s(num_bytes, costs()) is not None}
    if num_bytes < 2 * 2**20:
        assert set(estimates) == everything
    else:
        assert 1 <= len(estimates) <= 4
    assert list(estimates.values()) == sorted(estimates.values())
    assert all(ALGORITHMS[name].keeps_rank_order for name in shortlist(num_bytes, costs(), deterministic=True))
