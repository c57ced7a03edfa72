"""[elastic]: what it refuses, with the numbers and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.sections.refusals import expect_refusal


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        pytest.param(
            {"min_workers": 4, "max_workers": 2},
            "elastic.min_workers 4 is above elastic.max_workers 2",
            "lower the first or raise the second",
            id="min-above-max",
        ),
        pytest.param(
            {"scaling": "aggressive", "mode": "restart"},
            "elastic.scaling = aggressive changes the ranks while training goes on; elastic.mode is restart",
            'set elastic.mode = "in_place", or leave scaling out',
            id="scaling-by-restart",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused(keys: dict[str, Any], message: str, hint: str) -> None:
    expect_refusal({"elastic": keys}, message, hint)
