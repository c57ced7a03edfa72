"""Who keeps whose copy: never the rank itself, on another node if there is one, and a loss of both is refused."""

from __future__ import annotations

import pytest

from torsh_distributed.checkpoint.replicas.neighbours import holders_of, holders_of_lost
from torsh_distributed.errors import CheckpointError


def test_the_copy_is_on_the_next_node_at_the_same_place() -> None:
    assert holders_of(["a", "a", "b", "b", "c", "c"]) == [2, 3, 4, 5, 0, 1]
    assert holders_of(["a", "b", "a", "b"]) == [1, 0, 3, 2]
    assert holders_of(["a"] * 4) == [1, 2, 3, 0]


def test_uneven_nodes_leave_no_rank_without_a_copy() -> None:
    nodes = ["a", "a", "a", "b"]
    holders = holders_of(nodes)
    assert all(nodes[rank] != nodes[holder] for rank, holder in enumerate(holders))


def test_a_rank_lost_with_its_neighbour_is_refused() -> None:
    holders = holders_of(["a"] * 4)
    assert holders_of_lost(holders, {0, 1, 3}) == {2: 3}
    assert holders_of_lost(holders, {0, 2}) == {1: 2, 3: 0}
    with pytest.raises(CheckpointError, match="rank 2 is gone from memory: rank 2 and rank 3, which kept its copy"):
        holders_of_lost(holders, {0, 1})
