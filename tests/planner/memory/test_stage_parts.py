"""Stages of pipeline ranks, and what is in flight: the short forms against torch's own schedules."""

from __future__ import annotations

from collections import Counter

import pytest

from torsh_distributed.parallel.pipeline.schedule import compute_timeline, planned_order
from torsh_distributed.plan import Plan
from torsh_distributed.plan.sections.mesh import PipelineConfig
from torsh_distributed.planner.machine.step_time import bubble_of
from torsh_distributed.planner.memory.optimizer_profile import optimizer_named
from torsh_distributed.planner.memory.rank_memory import estimate_memory, estimate_peak
from torsh_distributed.planner.memory.stage_parts import microbatches_in_flight
from torsh_distributed.planner.model.profiling import profile_model
from torsh_distributed.train.demos.gpt import CharGPT

SCHEDULES = [("one_f_one_b", 1), ("interleaved_one_f_one_b", 2), ("interleaved_one_f_one_b", 3)]


def most_in_flight(config: PipelineConfig, pp: int, rank: int) -> set[tuple[tuple[int, int], ...]]:
    """By counting every action of torch's order: all moments that no other one exceeds in every stage."""
    alive: Counter[int] = Counter()
    moments: list[Counter[int]] = []
    for steps in planned_order(config, pp)[rank]:
        for stage, kind, _ in steps:
            alive[stage] += 1 if kind == "F" else -1
            moments.append(Counter(alive))
    return {tuple(sorted((+one).items())) for one in moments if not any(one < other for other in moments)}


@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES)
@pytest.mark.parametrize(("pp", "rounds"), [(2, 1), (2, 4), (4, 1), (4, 2), (4, 5), (3, 2)])
def test_what_is_in_flight_is_what_torch_schedules(schedule: str, stages_per_rank: int, pp: int, rounds: int) -> None:
    config = PipelineConfig(schedule=schedule, stages_per_rank=stages_per_rank, num_microbatches=pp * rounds)
    for rank in range(pp):
        found = {tuple(sorted((+Counter(one)).items())) for one in microbatches_in_flight(config, pp, rank)}
        assert found == most_in_flight(config, pp, rank)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES)
@pytest.mark.parametrize(("pp", "rounds"), [(2, 1), (2, 3), (4, 1), (4, 4), (8, 2)])
def test_the_bubble_is_that_of_the_timeline(schedule: str, stages_per_rank: int, pp: int, rounds: int) -> None:
    config = PipelineConfig(schedule=schedule, stages_per_rank=stages_per_rank, num_microbatches=pp * rounds)
    work = 3.0 * stages_per_rank
    assert bubble_of(config, pp) == pytest.approx(compute_timeline(config, pp).span / work - config.num_microbatches)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES[:2])
@pytest.mark.parametrize("activation", [{}, {"strategy": "uniform", "every_n_layers": 3}, {"strategy": "selective"}])
def test_the_peak_is_that_of_the_whole_table(
    schedule: str, stages_per_rank: int, activation: dict[str, object]
) -> None:
    pipeline = {"schedule": schedule, "stages_per_rank": stages_per_rank, "num_microbatches": 8}
    plan = Plan(dp=1, shard=2, pp=4, training={"batch_size": 32}, pipeline=pipeline, activation=activation).resolve(8)
    profile = profile_model(CharGPT(96, width=32, num_layers=12, num_heads=4), plan)
    optimizer = optimizer_named("AdamW")
    table, quick = (estimate(profile, plan, optimizer) for estimate in (estimate_memory, estimate_peak))
    assert quick.peak == table.peak
    assert len(quick.ranks) <= len(table.ranks)
