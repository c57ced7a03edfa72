"""The form of attention over split sequences follows what was measured."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.errors import TensorShapeMismatch
from torsh_distributed.parallel.context import chunks_of
from torsh_distributed.parallel.context.positions import PositionMask, choose_form, positions_of

CAUSAL = PositionMask(is_causal=True)


def in_window(size: int, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (key > query - size)


def test_heads_are_exchanged_where_they_divide() -> None:
    assert choose_form("auto", heads=8, size=4, length=4096, mask=CAUSAL) == "ulysses"
    assert choose_form("auto", heads=6, size=4, length=4096, mask=CAUSAL) == "ring"
    assert choose_form("ring", heads=8, size=4, length=4096, mask=CAUSAL) == "ring"


def test_a_ring_skips_what_a_window_hides_in_long_sequences() -> None:
    mask = PositionMask(allowed=partial(in_window, 256))
    assert choose_form("auto", heads=8, size=4, length=1024, mask=mask) == "ring"
    assert choose_form("auto", heads=8, size=4, length=512, mask=mask) == "ulysses"
    assert choose_form("auto", heads=8, size=4, length=1024, mask=mask, dropout_p=0.1) == "ulysses"
    wide = PositionMask(allowed=partial(in_window, 4096))
    assert choose_form("auto", heads=8, size=4, length=1024, mask=wide) == "ulysses", "it hides nothing here"


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
