"""[ddp]: what it refuses, with the numbers and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.sections.refusals import expect_refusal


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        pytest.param(
            {"min_bucket_size_mb": 30},
            "ddp.min_bucket_size_mb 30 is above ddp.max_bucket_size_mb 25",
            "lower the first or raise the second",
            id="first-bucket-too-large",
        ),
        pytest.param(
            {"static_graph": True, "find_unused_parameters": True},
            "ddp.find_unused_parameters and ddp.static_graph exclude each other",
            "keep ddp.static_graph if every step uses the same parameters: it finds unused ones once",
            id="two-ways-to-find-unused",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused(keys: dict[str, Any], message: str, hint: str) -> None:
    expect_refusal({"ddp": keys}, message, hint)
