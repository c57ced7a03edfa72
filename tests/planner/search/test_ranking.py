"""The best plan: legal, fitting, and the one that arithmetic by hand would take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.planner.live_memory import Wide, char_gpt, wide
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.planner.machine.machine_profile import machine_named
from torsh_distributed.planner.machine.step_time import StepPredictor
from torsh_distributed.planner.memory.optimizer_profile import optimizer_named
from torsh_distributed.planner.memory.rank_memory import estimate_memory
from torsh_distributed.planner.model.profiling import profile_model
from torsh_distributed.planner.search.auto_plan import ranked_plans
from torsh_distributed.planner.search.layouts import even_parts, meshes
from torsh_distributed.planner.search.plan_variants import PlanVariants
from torsh_distributed.planner.search.ranking import Ranking

BASE = Plan(training={"batch_size": 64})


def ranked(model: nn.Module, *, world_size: int = 4, memory_bytes: float | None = None, **options: bool) -> Ranking:
    machine = machine_named("a100-40gb")
    return ranked_plans(
        model, world_size=world_size, machine=machine, base=BASE, memory_bytes=memory_bytes, reserve=0.0, **options
    )


def test_every_plan_is_legal_fits_and_keeps_what_the_user_said() -> None:
    found = ranked(char_gpt(), memory_bytes=60e6)
    assert found.plans
    for one in found.plans:
        one.plan.validate(4)
        assert one.memory.peak_bytes <= 60e6
        assert one.plan.training.batch_size == 64
    times = [one.time.total_s for one in found.plans]
    assert all(one <= 1.03 * min(times[index:]) for index, one in enumerate(times)), "the fastest first, but for ties"


def test_a_small_model_in_much_memory_is_replicated() -> None:
    assert ranked(char_gpt()).plans[0].plan.mesh.degrees | {"dp": 4} == Plan(dp=4).mesh.degrees


def test_less_memory_takes_shards_and_says_why_replicas_are_not() -> None:
    found = ranked(wide(), memory_bytes=60e6)
    assert found.plans[0].plan.mesh.dp < 4
    reasons = {one.mesh: one.reason for one in found.rejections}
    assert "more than there are" in reasons["dp 4"]


def test_offload_is_taken_where_nothing_fits_without_it_and_what_it_costs_is_not_counted() -> None:
    with torch.device("meta"):
        large = Wide(8192, 8)  # more than the window through which offload computes
    some = ranked(large, world_size=1, memory_bytes=100e9)
    limit = 0.7 * some.plans[0].memory.peak_bytes
    assert not some.is_offloaded
    found = ranked(large, world_size=1, memory_bytes=limit)
    assert found.is_offloaded
    best = found.plans[0]
    assert best.plan.offload.enabled
    assert best.memory.peak_bytes <= limit
    assert any("offload" in name for name in best.time.not_measured)
    nothing = ranked(wide(), world_size=1, memory_bytes=1e6)
    assert not nothing.plans
    assert nothing.smallest is not None
    assert not nothing.smallest[0].offload.enabled


def test_simple_looks_at_replicas_and_shards_only() -> None:
    for one in ranked(char_gpt(), is_simple=True).plans:
        assert (one.plan.mesh.tp, one.plan.mesh.pp) == (1, 1)


def test_a_degree_that_the_heads_do_not_allow_is_rejected_in_a_sentence() -> None:
    found = ranked(char_gpt(), world_size=8)
    reasons = [one.reason for one in found.rejections if one.mesh == "tp 8"]
    assert reasons
    assert "heads" in reasons[0]


def test_a_batch_that_does_not_divide_is_said() -> None:
    found = ranked(char_gpt(), world_size=3)
    assert any("a batch of 64 does not divide over 3 ranks" in one.reason for one in found.rejections)


def test_every_mesh_has_all_ranks_once() -> None:
    found = list(meshes(16, profile_model(char_gpt()), devices_per_node=8))
    for axes in found:
        assert Plan(**axes).mesh.resolve(16).degrees == axes  # type: ignore[arg-type]
    assert len(found) == len({tuple(axes.values()) for axes in found})


def test_a_batch_from_the_memory_left_is_micro_times_passes_times_ranks() -> None:
    wanted = 100
    base = Plan(training={"batch_size": wanted})
    found = {}
    for memory_bytes in (20e6, 90e6):
        ranking = ranked_plans(
            char_gpt(),
            world_size=3,
            machine=machine_named("a100-40gb"),
            base=base,
            memory_bytes=memory_bytes,
            reserve=0.0,
            batch="auto",
        )
        for one in ranking.plans:
            training, degree = one.plan.training, one.plan.mesh.data_degree
            one.plan.validate(3)
            assert one.memory.peak_bytes <= memory_bytes
            pieces = training.gradient_accumulation if one.plan.mesh.pp == 1 else one.plan.pipeline.num_microbatches
            assert wanted <= training.batch_size < wanted + degree * (1 + pieces)
            assert training.batch_size == one.memory.num_samples * pieces * degree
        found[memory_bytes] = ranking.plans[0]
    assert found[90e6].memory.num_samples > found[20e6].memory.num_samples
    assert found[90e6].sample_s < found[20e6].sample_s
    chosen = Plan.auto(char_gpt(), world_size=4, machine="a100-40gb", batch="auto")
    assert chosen.training.batch_size >= 64, "32·sqrt(4), where nothing is said"


def test_even_parts_are_the_fewest_passes_of_each_size() -> None:
    assert list(even_parts(10)) == [(1, 10), (2, 5), (3, 4), (4, 3), (5, 2), (10, 1)]
    for local in range(1, 60):
        sizes = [samples for _, samples in even_parts(local)]
        assert sizes == sorted({-(-local // passes) for passes in range(1, local + 1)}, reverse=True)
        assert all(passes * samples >= local for passes, samples in even_parts(local))


def test_plan_auto_gives_the_first_or_says_what_is_nearest() -> None:
    chosen = Plan.auto(char_gpt(), world_size=4, machine="a100-40gb", base=BASE)
    chosen.validate(4)
    with pytest.raises(InvalidArgument, match=r"none of \d+ plans fits(.|\n)*the nearest needs"):
        Plan.auto(char_gpt(), world_size=4, machine="a100-40gb", base=BASE, memory_bytes=1e5)


def test_the_best_plan_of_a_mesh_is_the_best_of_all_its_variants() -> None:
    machine, optimizer, limit = machine_named("a100-40gb"), optimizer_named("AdamW"), 45e6
    profile = profile_model(char_gpt(), BASE)
    found = ranked(char_gpt(), memory_bytes=limit)
    assert len(found.plans) > 5
    predictor = StepPredictor(profile, machine, optimizer)
    for one in found.plans:
        mesh = one.plan.mesh.degrees
        local = 64 // one.plan.mesh.data_degree
        times = []
        for variant in PlanVariants(BASE, has_blocks=True).on(mesh, local):
            plan = BASE.replace(**variant.changes)
            try:
                plan.validate(4)
                fits = estimate_memory(profile, plan, optimizer).peak_bytes <= limit
            except ConfigurationError:  # not legal, or more stages than blocks
                continue
            if fits:
                times.append(predictor.step_time(plan).total_s)
        if one.plan.activation.strategy == "budget":
            assert one.time.total_s < min(times)
        else:
            assert one.time.total_s == pytest.approx(min(times))


def test_lengths_that_differ_fit_by_the_longest_and_take_the_time_of_the_mean() -> None:
    def of(sequence: int, mean_sequence: int | None = None) -> Ranking:
        machine = machine_named("a100-40gb")
        return ranked_plans(
            char_gpt(), world_size=1, machine=machine, base=BASE, sequence=sequence, mean_sequence=mean_sequence
        )

    longest, mean, both = of(64), of(16), of(64, 16)
    assert both.plans[0].memory.peak_bytes == longest.plans[0].memory.peak_bytes
    assert both.plans[0].time.total_s == mean.plans[0].time.total_s < longest.plans[0].time.total_s
    assert both.tokens_per_sample == 16


def test_a_mean_length_that_cannot_be_is_refused() -> None:
    machine, example = machine_named("a100-40gb"), (torch.zeros(1, 8, dtype=torch.int64),)
    with pytest.raises(InvalidArgument, match="a mean length of 64 tokens is above the longest, 16"):
        ranked_plans(char_gpt(), world_size=1, machine=machine, sequence=16, mean_sequence=64)
    with pytest.raises(InvalidArgument, match="cannot be told from an example"):
        ranked_plans(char_gpt(), world_size=1, machine=machine, mean_sequence=64, example=example)
