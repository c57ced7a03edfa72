"""[pipeline]: what it refuses, with the numbers and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.sections.refusals import expect_refusal


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        pytest.param(
            {"schedule": "zbv_zero_bubble"},
            "pipeline.stages_per_rank is 1, but pipeline.schedule zbv_zero_bubble holds exactly 2 on each rank",
            "set pipeline.stages_per_rank = 2, or choose another schedule",
            id="v-shaped-needs-two-stages",
        ),
        pytest.param(
            {"schedule": "interleaved_one_f_one_b"},
            (
                "pipeline.stages_per_rank is 1, but pipeline.schedule interleaved_one_f_one_b holds at least 2 on"
                " each rank"
            ),
            "set pipeline.stages_per_rank = 2, or choose another schedule",
            id="interleaved-needs-several-stages",
        ),
        pytest.param(
            {"stages_per_rank": 2},
            "pipeline.stages_per_rank is 2, but pipeline.schedule one_f_one_b holds exactly 1 on each rank",
            "set pipeline.stages_per_rank = 1, or choose another schedule",
            id="1f1b-needs-one-stage",
        ),
        pytest.param(
            {"split_points": ["layers.4"]},
            'pipeline.split_points and pipeline.balance = "manual" go together, but only one is set',
            "set both, or neither",
            id="split-points-without-manual",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused(keys: dict[str, Any], message: str, hint: str) -> None:
    expect_refusal({"pipeline": keys}, message, hint)
