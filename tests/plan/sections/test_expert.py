"""[expert]: what it refuses, with the numbers and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.sections.refusals import expect_refusal


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        pytest.param(
            {"num_experts": 2, "num_experts_per_token": 4},
            "expert.num_experts_per_token 4 is above expert.num_experts 2",
            "a token cannot go to more experts than there are",
            id="more-experts-per-token-than-experts",
        ),
        pytest.param(
            {"num_experts_per_token": 1, "normalize_weights": True},
            (
                "expert.normalize_weights with expert.num_experts_per_token 1 makes every weight 1, and the gate "
                "learns nothing"
            ),
            "set expert.normalize_weights = false, or send a token to 2 experts",
            id="normalized-single-weight",
        ),
        pytest.param(
            {"num_experts": 6, "gate_groups": 4},
            "expert.gate_groups 4 does not divide expert.num_experts 6",
            "all groups have the same number of experts",
            id="groups-do-not-divide",
        ),
        pytest.param(
            {"gate_groups": 8, "gate_top_groups": 1},
            "expert.gate_top_groups 1 of 8 groups of 1 does not give a token 2 experts to choose",
            "raise it, to at most expert.gate_groups",
            id="too-few-top-groups",
        ),
        pytest.param(
            {"gate_grouping": "learned"},
            "expert.gate_grouping = learned needs expert.gate_groups above 1, and no expert.gate_top_groups",
            "learned groups share every expert, so none of them can be left out",
            id="learned-without-groups",
        ),
        pytest.param(
            {"placement": "replicated", "rebalance_threshold": 0.3},
            "expert.rebalance_threshold 0.3 has nothing to move: every rank has every expert",
            'leave expert.rebalance_threshold out, or set expert.placement = "contiguous"',
            id="nothing-to-move",
        ),
        pytest.param(
            {"placement": "replicated", "hot_copies": 2},
            "expert.hot_copies 2 has nothing to lend: every rank has every expert",
            'leave expert.hot_copies out, or set expert.placement = "contiguous"',
            id="nothing-to-lend",
        ),
        pytest.param(
            {"num_experts": 4, "hot_copies": 4},
            "expert.hot_copies 4 is not below expert.num_experts 4",
            "a rank borrows experts that it does not hold; 1 is a good start",
            id="more-copies-than-experts",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused(keys: dict[str, Any], message: str, hint: str) -> None:
    expect_refusal({"expert": keys}, message, hint)
