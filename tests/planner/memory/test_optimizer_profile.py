"""What an optimizer keeps and needs, found by steps that nobody else sees."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.planner.memory.optimizer_profile import optimizer_named, optimizer_or_assumed


@pytest.mark.parametrize(("name", "state_ratio"), [("SGD", 0.0), ("Adagrad", 1.0), ("AdamW", 2.0), ("RMSprop", 1.0)])
def test_the_state_is_that_of_a_step(name: str, state_ratio: float) -> None:
    assert optimizer_named(name).state_ratio == state_ratio


def test_no_hook_of_the_process_counts_these_steps() -> None:
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *told: seen.append(told))
    try:
        optimizer_named("NAdam")
        optimizer_named("Rprop")
    finally:
        handle.remove()
    assert seen == []


def test_an_optimizer_that_cannot_be_tried_counts_as_adamw_and_says_so() -> None:
    with pytest.raises(InvalidArgument, match="LBFGS cannot be tried"):
        optimizer_named("LBFGS")
    known, note = optimizer_or_assumed("LBFGS")
    assert known.name == "AdamW"
    assert note == "counted with the state of AdamW: LBFGS cannot be tried: its step needs more than gradients"


def test_one_that_is_known_has_no_note() -> None:
    assert optimizer_or_assumed("sgd")[1] == ""
