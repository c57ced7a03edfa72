"""What of a plan may change while its job runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.plan.problems import keys_of
from torsh_distributed.plan.running_change import CHANGEABLE, RunningChange


def test_a_change_is_read_written_told_and_applied() -> None:
    table = {
        "set": {"training": {"gradient_clipping": 1}, "compress": {"method": "int8"}},
        "learning_rate_factor": 0.5,
        "save_checkpoint": True,
    }
    change = RunningChange.from_dict(table)
    assert RunningChange.from_dict(json.loads(json.dumps(change.to_dict()))) == change
    assert str(change) == (
        "training.gradient_clipping = 1.0, compress.method = int8, learning rates × 0.5, a checkpoint"
    )
    changed = change.applied_to(Plan(training={"steps": 5}))
    assert (changed.training.steps, changed.training.gradient_clipping, changed.compress.method) == (5, 1.0, "int8")


def test_every_key_that_can_change_is_a_key_of_a_plan() -> None:
    assert set(CHANGEABLE) <= set(keys_of(Plan))


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({}, "changes nothing"),
        ({"set": {"mesh": {"dp": 4}}}, "mesh.dp cannot change while a job runs"),
        ({"set": {"training": {"learning_rate": 0.1}}}, "training.learning_rate cannot change"),
        ({"set": {"training": {"gradient_cliping": 1.0}}}, "gradient_cliping"),
        ({"set": {"training": {"gradient_clipping": -1.0}}}, "training.gradient_clipping must be"),
        ({"set": {"training": 5}}, "training must be a section"),
        ({"set": "training"}, "sections and keys"),
        ({"learning_rate_factor": 0}, "learning_rate_factor must be a number above 0"),
        ({"learning_rate_factor": True}, "learning_rate_factor must be a number above 0"),
        ({"save_checkpoint": "yes"}, "save_checkpoint must be true or false"),
        ({"stop": True}, "has no key stop"),
    ],
)
def test_what_cannot_change_is_refused_by_name(table: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        RunningChange.from_dict(table)
