"""Time covered by overlapping intervals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.recording.span_account import covered_s

INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: (min(pair), max(pair))))


@given(INTERVALS)
def test_the_union_is_counted_once(intervals: list[tuple[int, int]]) -> None:
    by_counting = len({tick for start, end in intervals for tick in range(start, end)})
    assert covered_s([(float(start), float(end)) for start, end in intervals]) == by_counting
