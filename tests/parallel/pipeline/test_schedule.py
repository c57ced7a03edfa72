"""Schedules on a time axis: bubbles match their formulas, and dependencies hold."""

from __future__ import annotations

import itertools

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.pipeline import Timeline, compute_timeline
from torsh_distributed.parallel.pipeline.schedule import lay_out
from torsh_distributed.plan.sections.mesh import STAGES_PER_RANK, PipelineConfig


def config(schedule: str, num_microbatches: int) -> PipelineConfig:
    return PipelineConfig(
        schedule=schedule, stages_per_rank=STAGES_PER_RANK[schedule][0], num_microbatches=num_microbatches
    )


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (3, 1), (1, 2)])
def test_the_bubble_of_simple_schedules_is_the_known_one(schedule: str, num_ranks: int, num_microbatches: int) -> None:
    bubble = compute_timeline(config(schedule, num_microbatches), num_ranks).bubble
    assert bubble == pytest.approx((num_ranks - 1) / (num_microbatches + num_ranks - 1))


def test_interleaving_divides_the_bubble_and_zero_bubble_nearly_removes_it() -> None:
    bubbles = {name: compute_timeline(config(name, 8), 4).bubble for name in STAGES_PER_RANK}
    assert bubbles["interleaved_one_f_one_b"] == pytest.approx(3 / (2 * 8 + 3))
    assert bubbles["interleaved_zero_bubble"] < bubbles["interleaved_one_f_one_b"] < bubbles["one_f_one_b"]
    assert bubbles["zbv_zero_bubble"] < 0.1


@pytest.mark.parametrize("schedule", list(STAGES_PER_RANK))
def test_every_microbatch_passes_every_stage_in_order_one_action_at_a_time(schedule: str) -> None:
    timeline = compute_timeline(config(schedule, 8), 4)
    stages = 4 * STAGES_PER_RANK[schedule][0]
    forward = {(one.stage, one.microbatch): one for one in timeline.actions if one.kind == "F"}
    backward = {(one.stage, one.microbatch): one for one in timeline.actions if one.kind in "BI"}
    assert len(forward) == len(backward) == stages * 8
    for (stage, microbatch), action in forward.items():
        if stage:
            assert action.start >= forward[stage - 1, microbatch].end
        assert backward[stage, microbatch].start >= action.end
        if stage < stages - 1:
            assert backward[stage, microbatch].start >= backward[stage + 1, microbatch].end
    for rank in range(4):
        mine = sorted((one.start, one.end) for one in timeline.actions if one.rank == rank)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(mine))


def test_a_schedule_computed_with_its_own_costs_is_itself() -> None:
    costs = {"F": 1.0, "I": 1.5, "W": 0.5, "B": 2.0}
    for schedule in STAGES_PER_RANK:
        timeline = compute_timeline(config(schedule, 8), 2, costs=costs)
        assert timeline.costs.items() <= costs.items()
        assert compute_timeline(config(schedule, 8), 2, costs=timeline.costs) == timeline


def test_results_of_paired_steps_are_sent_together() -> None:
    """As torch runs it: the forward of a pair waits for the pair's backward before the next stage gets it."""
    order = {0: [((0, "F", 0),), ((0, "F", 1), (0, "B", 0))], 1: [((1, "F", 0),), ((1, "B", 0),), ((1, "F", 1),)]}
    timeline = lay_out(order)  # type: ignore[arg-type]
    when = {(one.stage, one.kind, one.microbatch): (one.start, one.end) for one in timeline.actions}
    assert when[0, "F", 1] == (1.0, 2.0)
    assert when[0, "B", 0] == (4.0, 6.0), "it needs the backward of stage 1"
    assert when[1, "F", 1] == (6.0, 7.0)


def test_the_first_stage_does_its_backward_at_once() -> None:
    timeline = compute_timeline(config("zbv_zero_bubble", 8), 2, costs={"F": 1.0, "I": 1.5, "W": 0.5, "B": 2.0})
    halves = {one.kind: one.end - one.start for one in timeline.actions if one.stage == 0 and one.kind in "IW"}
    assert halves == {"I": 0.0, "W": 2.0}
    assert timeline.costs == pytest.approx({"F": 1.0, "I": 1.5, "W": 0.5, "B": 2.0})


def test_an_empty_timeline_has_no_bubble() -> None:
    assert Timeline((), 2).bubble == lay_out({}).bubble == 0.0


def test_settings_that_torch_refuses_are_configuration_errors() -> None:
    with pytest.raises(ConfigurationError, match=r"pipeline.schedule dual_pipe_v: .*(?s:.)*num_microbatches=2"):
        compute_timeline(config("dual_pipe_v", 2), 4)
