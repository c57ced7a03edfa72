"""[offload]: what it refuses, with the numbers and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.sections.refusals import expect_refusal


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        pytest.param(
            {"enabled": True, "params": False, "grads": False, "optimizer_state": False},
            ("offload.enabled is true, but offload.params, offload.grads and offload.optimizer_state are all false"),
            "set at least one of them to true, or offload.enabled = false",
            id="nothing-offloaded",
        ),
        pytest.param(
            {"enabled": True, "optimizer_state": False},
            (
                "offload.optimizer_state is false, but the update runs where the state is: parameters or "
                "gradients that leave the device would have to come back for it"
            ),
            ("set offload.optimizer_state = true, and offload.device_optimizer_ratio to keep a share on the device"),
            id="state-stays",
        ),
    ],
)
def test_values_that_exclude_each_other_are_refused(keys: dict[str, Any], message: str, hint: str) -> None:
    expect_refusal({"offload": keys}, message, hint)
