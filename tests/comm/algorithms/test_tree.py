"""Binomial trees, whatever their size and root."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.algorithms.tree import binomial_branch


@given(size=st.integers(min_value=1, max_value=40), root=st.integers(min_value=0, max_value=39))
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
