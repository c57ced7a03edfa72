"""The picture of a step: what is drawn of each rank is what the simulation did with it."""

from __future__ import annotations

import pytest

from torsh_distributed.parallel.pipeline import compute_timeline
from torsh_distributed.parallel.pipeline.schedule import Timeline
from torsh_distributed.plan import Plan
from torsh_distributed.planner.forecast.simulated_steps import Spreads, simulate_steps
from torsh_distributed.planner.forecast.step_picture import picture_of_step
from torsh_distributed.planner.machine.step_time import StagePhases, StepPhases

UNEVEN = Spreads(ranks=0.1, phases=0.05)


def kinds(timeline: Timeline, row: int) -> str:
    return "".join(one.kind for one in sorted(timeline.actions, key=lambda one: one.start) if one.rank == row)


def waited_for_averaging(timeline: Timeline, row: int) -> float:
    mine = [one for one in timeline.actions if one.rank == row]
    return next(one.start for one in mine if one.kind == "C") - max(one.end for one in mine if one.kind == "B")


def test_the_slowest_a_typical_and_the_fastest_rank_wait_for_each_other() -> None:
    phases = StepPhases((StagePhases(1.0, 0.0, 2.0, 0.0, num_blocks=4),), (), 0.0, ("dp",), 0.5, 0.25)
    plan = Plan(dp=16, training={"batch_size": 32, "gradient_accumulation": 2}).resolve(16)
    shown = picture_of_step(phases, plan, spreads=UNEVEN)
    assert [name.split(", ")[1].strip() for name in shown.row_names] == ["the slowest", "typical", "the fastest"]
    assert {kinds(shown, row) for row in range(3)} == {"FBFBCU"}
    slowest, typical, fastest = (waited_for_averaging(shown, row) for row in range(3))
    assert slowest == pytest.approx(0.0)
    assert 0.0 < typical < fastest
    # The picture is of the first step that is drawn with the same seed.
    first_step = simulate_steps(phases, plan, spreads=UNEVEN, num_steps=1).mean_s
    every_end = max(one.end for one in picture_of_step(phases, plan, spreads=UNEVEN).actions)
    assert every_end <= first_step
    assert shown.bubble > 0.0


def test_ranks_that_meet_in_every_block_are_chosen_by_how_long_they_compute() -> None:
    phases = StepPhases((StagePhases(1.0, 0.4, 2.0, 0.8, num_blocks=2),), ("shard",), 0.0, ("shard",), 0.5, 0.25)
    plan = Plan(dp=1, shard=4, training={"batch_size": 4}).resolve(4)
    shown = picture_of_step(phases, plan, spreads=UNEVEN)
    busy = [sum(one.end - one.start for one in shown.actions if one.rank == row) for row in range(3)]
    assert busy == sorted(busy, reverse=True)
    assert busy[0] > busy[2]


def test_equal_ranks_are_drawn_once() -> None:
    phases = StepPhases((StagePhases(1.0, 0.4, 2.0, 0.8, num_blocks=2),), ("shard",), 0.0, ("shard",), 0.5, 0.25)
    plan = Plan(dp=1, shard=4, training={"batch_size": 4}).resolve(4)
    shown = picture_of_step(phases, plan, spreads=Spreads())
    assert shown.row_names == ("rank 0, all alike ",)
    assert kinds(shown, 0) == "FCFCBCBCCU"
    assert shown.bubble == pytest.approx(0.0)
    assert shown.span == pytest.approx(1.4 + 2.8 + 0.5 + 0.25)


def test_a_pipeline_of_equal_ranks_is_drawn_as_its_schedule() -> None:
    phases = StepPhases((StagePhases(1.0, 0.0, 2.0, 0.0, num_blocks=1),) * 4, (), 0.0, (), 0.0, 0.0)
    plan = Plan(dp=2, pp=4, training={"batch_size": 16}, pipeline={"num_microbatches": 8}).resolve(8)
    shown = picture_of_step(phases, plan, spreads=Spreads())
    expected = compute_timeline(plan.pipeline, 4)
    assert [name.split(",")[1].strip() for name in shown.row_names] == [f"pp {stage}" for stage in range(4)]
    assert {(a.rank, a.kind, a.microbatch, a.start) for a in shown.actions if a.kind != "U"} == {
        (a.rank, a.kind, a.microbatch, a.start) for a in expected.actions
    }


def test_of_unequal_pipelines_the_last_one_is_drawn() -> None:
    phases = StepPhases((StagePhases(1.0, 0.0, 2.0, 0.0, num_blocks=1),) * 2, (), 0.1, ("dp",), 0.5, 0.25)
    plan = Plan(dp=8, pp=2, training={"batch_size": 32}, pipeline={"num_microbatches": 4}).resolve(16)
    shown = picture_of_step(phases, plan, spreads=UNEVEN, seed=3)
    averaged = [one for one in shown.actions if one.kind == "C"]
    assert len(averaged) == 2
    # Nobody is later: its first stage, the last to have its gradients, waits for no other pipeline.
    assert max(one.start for one in averaged) == pytest.approx(max(a.end for a in shown.actions if a.kind == "B"))
