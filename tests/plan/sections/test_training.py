"""[training]: what it refuses, with the numbers and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.sections.refusals import expect_refusal


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        pytest.param(
            {"batch_size": 2, "gradient_accumulation": 4},
            "training.gradient_accumulation 4 is above training.batch_size 2",
            "a pass needs at least one sample",
            id="more-passes-than-samples",
        ),
        pytest.param(
            {"steps": 10, "warmup_steps": 20},
            "training.warmup_steps 20 is above training.steps 10",
            "warm up for fewer steps: the learning rate would never reach its value",
            id="warm-up-longer-than-training",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused(keys: dict[str, Any], message: str, hint: str) -> None:
    expect_refusal({"training": keys}, message, hint)
