"""Positions: each on one rank, and as much to do on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.errors import TensorShapeMismatch
from torsh_distributed.parallel.context import chunks_of
from torsh_distributed.parallel.context.order import positions_of


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_position_is_on_one_rank(size: int, factor: int) -> None:
    length = size * factor
    found = [place for rank in range(size) for place in positions_of(length, rank=rank, size=size).tolist()]
    assert sorted(found) == list(range(length))


@given(st.integers(1, 6), st.integers(1, 4))
def test_under_a_causal_mask_every_rank_has_the_same_work(size: int, factor: int) -> None:
    length = 2 * size * factor
    works = [
        sum(place + 1 for start, stop in chunks_of(length, rank=rank, size=size) for place in range(start, stop))
        for rank in range(size)
    ]
    assert len(set(works)) == 1


def test_a_length_that_does_not_split_is_refused_with_what_would() -> None:
    with pytest.raises(TensorShapeMismatch, match=r"a sequence of 7 does not split over 2 ranks(?s:.)*multiple of 4"):
        chunks_of(7, rank=0, size=2)
