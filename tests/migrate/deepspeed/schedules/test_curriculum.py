"""The curriculum's difficulty, and the share of layers that is kept."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

from tests.bed.real_deepspeed import use_deepspeed
from tests.migrate.deepspeed.conftest import DeepSpeedWorld
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.migrate.deepspeed.schedules.curriculum import CurriculumSchedule, ProgressiveLayerDrop

LINEAR = {
    "min_difficulty": 8,
    "max_difficulty": 1024,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 50, "difficulty_step": 8},
}
CASES: list[dict[str, Any]] = [
    LINEAR,
    {**LINEAR, "min_difficulty": 8, "schedule_config": {"total_curriculum_step": 37, "difficulty_step": 16}},
    {
        **LINEAR,
        "min_difficulty": 13,
        "schedule_type": "fixed_root",
        "schedule_config": {"total_curriculum_step": 60, "difficulty_step": 5, "root_degree": 2},
    },
    {
        "min_difficulty": 1,
        "max_difficulty": 3,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [1, 2, 3], "max_step": [5, 10]},
    },
]


def _walked(schedule: Any) -> list[int]:
    return [schedule.update_difficulty(step) for step in range(80)] + [schedule.get_difficulty(7)]


def _theirs() -> list[list[int]]:
    use_deepspeed()
    module = importlib.import_module("deepspeed.runtime.data_pipeline.curriculum_scheduler")
    return [_walked(module.CurriculumScheduler(case)) for case in CASES]


@pytest.mark.needs_deepspeed
def test_difficulties_are_those_of_deepspeed(deepspeed_world: DeepSpeedWorld) -> None:
    (theirs,) = deepspeed_world.run_theirs(_theirs, num_ranks=1)
    assert [_walked(CurriculumSchedule(case)) for case in CASES] == theirs


def test_difficulty_rises_in_steps_and_stays_at_its_maximum() -> None:
    schedule = CurriculumSchedule(LINEAR)
    levels = [schedule.update_difficulty(step) for step in (0, 25, 50, 3)]
    assert levels == [8, 512, 1024, 1024]
    again = CurriculumSchedule(LINEAR)
    again.load_state_dict(schedule.state_dict())
    assert again.update_difficulty(0) == 1024


def test_a_custom_schedule_needs_its_function() -> None:
    schedule = CurriculumSchedule({"min_difficulty": 1, "max_difficulty": 9, "schedule_type": "custom"})
    with pytest.raises(InvalidArgument, match="has no function"):
        schedule.get_difficulty(1)
    schedule.set_custom_get_difficulty(lambda step: 2 * step)
    assert schedule.get_difficulty(3) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule_type": "fixed_lineal"}, "did you mean fixed_linear"),
        ({"schedule_config": {"difficulty_step": 8}}, "needs schedule_config.total_curriculum_step"),
        (
            {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1, 2], "max_step": [1, 2]}},
            "one difficulty more",
        ),
    ],
)
def test_a_wrong_curriculum_is_refused_in_words(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CurriculumSchedule({**LINEAR, **change})


def test_layers_are_dropped_towards_theta() -> None:
    drop = ProgressiveLayerDrop(theta=0.5, gamma=0.01)
    assert drop.get_theta() == 1
    drop.update_state(100)
    assert drop.get_theta() == pytest.approx(0.5 * math.exp(-1) + 0.5)
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": drop.get_theta()}
    with pytest.raises(InvalidArgument):
        ProgressiveLayerDrop(theta=0)
