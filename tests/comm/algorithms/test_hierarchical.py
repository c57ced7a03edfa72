"""Nodes as the hierarchical algorithm sees them."""

from __future__ import annotations

from torsh_distributed.comm.algorithms.hierarchical import by_node


def test_positions_are_gathered_by_node() -> None:
    assert by_node([4, 4, 7, 4]) == [[0, 1, 3], [2]]
