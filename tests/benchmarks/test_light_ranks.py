"""Hundreds of ranks join one store at the same moment, and none is turned away."""

from __future__ import annotations

import pytest

from benchmarks.light_ranks import join_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.matrix]


def test_ranks_that_connect_at_once_are_all_let_in_and_each_costs_the_same() -> None:
    few, many = join_ranks(20), join_ranks(200)
    assert few.messages_per_join == many.messages_per_join == 14.0
    assert many.verdict_bytes < 200, "it does not grow with the world"
