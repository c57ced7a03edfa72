"""The partition is optimal, checked against all others."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.pipeline import partition


def max_cost(costs: list[float], starts: tuple[int, ...]) -> float:
    return max(sum(costs[first:last]) for first, last in itertools.pairwise([*starts, len(costs)]))


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8).flatmap(
        lambda c: st.tuples(st.just(c), st.integers(1, len(c)))
    )
)
def test_no_other_partition_has_a_cheaper_most_expensive_stage(case: tuple[list[float], int]) -> None:
    costs, num_stages = case
    starts = partition(costs, num_stages)
    assert starts[0] == 0
    assert len(set(starts)) == num_stages
    assert list(starts) == sorted(starts)
    others = itertools.combinations(range(1, len(costs)), num_stages - 1)
    assert max_cost(costs, starts) == min(max_cost(costs, (0, *other)) for other in others)


def test_more_stages_than_layers_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigurationError, match="4 stages need as many layers, but the model has 3"):
        partition([1.0, 1.0, 1.0], 4)
