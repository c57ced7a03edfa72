"""Simulated steps: of equal ranks the prediction, of unequal ones what the slowest of each group decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.planner.live_memory import char_gpt
from torsh_distributed.parallel.pipeline import compute_timeline
from torsh_distributed.plan import Plan
from torsh_distributed.planner.forecast.simulated_steps import SimulatedSteps, Spreads, simulate_steps
from torsh_distributed.planner.machine.machine_profile import machine_named
from torsh_distributed.planner.machine.step_time import StagePhases, StepPhases, StepPredictor
from torsh_distributed.planner.memory.optimizer_profile import optimizer_named
from torsh_distributed.planner.model.profiling import profile_model


def planned(num_ranks: int, **sections: Any) -> tuple[StepPredictor, Plan]:
    plan = Plan(**{"training": {"batch_size": num_ranks * 4}, **sections}).resolve(num_ranks)
    profile = profile_model(char_gpt(), plan)
    return StepPredictor(profile, machine_named("h100"), optimizer_named("AdamW")), plan


@pytest.mark.parametrize(
    "sections",
    [
        {"dp": 8},
        {"dp": 2, "tp": 4},
        {"dp": 1, "shard": 8},
        {"dp": 8, "training": {"batch_size": 64, "gradient_accumulation": 4}},
    ],
)
def test_equal_ranks_take_the_predicted_step(sections: dict[str, Any]) -> None:
    predictor, plan = planned(8, **sections)
    found = simulate_steps(predictor.phases(plan), plan, spreads=Spreads(), num_steps=2)
    assert found.mean_s == pytest.approx(predictor.step_time(plan).total_s, rel=1e-6)
    assert found.slowdown == 1.0


def test_a_pipeline_of_equal_stages_has_the_bubble_of_its_schedule() -> None:
    stage = StagePhases(1.0, 0.0, 2.0, 0.0, num_blocks=1)
    phases = StepPhases((stage,) * 4, (), 0.0, (), 0.0, 0.0)
    plan = Plan(dp=1, pp=4, training={"batch_size": 8}, pipeline={"num_microbatches": 8}).resolve(4)
    found = simulate_steps(phases, plan, spreads=Spreads(), num_steps=1)
    assert found.mean_s == pytest.approx((8 + 4 - 1) * 3.0)


@pytest.mark.parametrize(
    "schedule",
    ["gpipe", "interleaved_one_f_one_b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v"],
)
def test_equal_stages_take_what_each_schedule_takes(schedule: str) -> None:
    per_rank = 1 if schedule == "gpipe" else 2
    pipeline = {"num_microbatches": 8, "schedule": schedule, "stages_per_rank": per_rank}
    plan = Plan(dp=1, pp=4, training={"batch_size": 8}, pipeline=pipeline).resolve(4)
    phases = StepPhases((StagePhases(per_rank, 0.0, 2.0 * per_rank, 0.0, num_blocks=2),) * 4, (), 0.0, (), 0.0, 0.0)
    found = simulate_steps(phases, plan, spreads=Spreads(), num_steps=1)
    assert found.mean_s == pytest.approx(compute_timeline(plan.pipeline, 4).span)


def simple(num_ranks: int, spreads: Spreads, seed: int = 0) -> SimulatedSteps:
    phases = StepPhases((StagePhases(1.0, 0.0, 2.0, 0.0, num_blocks=1),), (), 0.0, ("dp",), 0.5, 0.25)
    plan = Plan(dp=num_ranks, training={"batch_size": num_ranks}).resolve(num_ranks)
    return simulate_steps(phases, plan, spreads=spreads, num_steps=20, seed=seed)


def test_one_straggler_holds_up_all_by_as_much_as_it_computes_longer() -> None:
    found = simple(2000, Spreads(slow_ranks=0.01, slow_by=2.0))
    assert found.steps_s == pytest.approx([2 * 3.0 + 0.5 + 2 * 0.25] * 20)
    assert found.waited["averaging of gradients"] > 0.4


def test_more_ranks_wait_longer_for_the_slowest() -> None:
    steps = [simple(count, Spreads(phases=0.05)).mean_s for count in (1, 16, 1024)]
    assert steps[0] < steps[1] < steps[2]
    # The largest of 1,024 draws with a spread of 5 %, computed directly.
    draws = np.random.default_rng(1).lognormal(-0.00125, 0.05, (400, 1024, 2)) @ np.array([1.0, 2.0])
    assert steps[2] == pytest.approx(draws.max(axis=1).mean() + 0.75, rel=0.02)


def test_the_same_seed_draws_the_same_steps() -> None:
    spreads = Spreads(ranks=0.02, phases=0.05)
    assert simple(64, spreads).steps_s == simple(64, spreads).steps_s
    assert simple(64, spreads).steps_s != simple(64, spreads, seed=1).steps_s
