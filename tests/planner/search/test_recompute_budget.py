"""Recomputation for a budget: the least of all choices, by estimate; on real ranks the peak, and the same losses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torsh_distributed as td
from tests.bed.world import World
from tests.planner.live_memory import batch_for, char_gpt, loss_fn, measured_peak, wide
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.planner.machine.machine_profile import machine_named
from torsh_distributed.planner.machine.step_time import StepPredictor
from torsh_distributed.planner.memory.optimizer_profile import optimizer_named
from torsh_distributed.planner.memory.rank_holdings import Recompute, recomputed_blocks
from torsh_distributed.planner.memory.rank_memory import estimate_memory
from torsh_distributed.planner.model.profiling import profile_model
from torsh_distributed.planner.search.auto_plan import ranked_plans
from torsh_distributed.planner.search.recompute_budget import BlockKind, RecomputeSearch, least_counts, with_choice

ADAMW = optimizer_named("AdamW")


class Uneven(nn.Module):
    """Blocks of two kinds in turns, one of which keeps four times as much."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 256, 64, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64)) for width in widths
        )

    def forward(self, features: Tensor) -> Tensor:
        for block in self.blocks:
            features = features + block(features)
        return features


def search_for(model: nn.Module, plan: Plan, example: Any = None) -> RecomputeSearch:
    profile = profile_model(model, plan, example=example)
    predictor = StepPredictor(profile, machine_named("a100-40gb"), ADAMW)
    return RecomputeSearch(profile, predictor, ADAMW, "cpu")


@pytest.mark.parametrize(
    ("build", "sections"),
    [
        (char_gpt, {"training": {"batch_size": 16}}),
        (char_gpt, {"dp": 1, "pp": 2, "training": {"batch_size": 16}}),
        (Uneven, {"training": {"batch_size": 4096}}),
    ],
    ids=["equal blocks", "pipeline", "two kinds"],
)
def test_no_choice_that_fits_takes_less_time(build: Any, sections: dict[str, Any]) -> None:
    plan = Plan(**sections)
    plan = plan.resolve(plan.mesh.pp)
    search = search_for(build(), plan, (torch.zeros(1, 64),) if build is Uneven else None)
    every = [
        with_choice(plan, search.profile, choice)
        for choice in itertools.product(Recompute, repeat=search.profile.num_blocks)
    ]
    known = [
        (search.predictor.step_time(one).total_s, estimate_memory(search.profile, one, ADAMW, device_type="cpu"))
        for one in every
    ]
    peaks = sorted({memory.peak_bytes for _, memory in known})
    assert len(peaks) > 3
    for limit in [peaks[0], *peaks[1 : -1 : max(1, len(peaks) // 6)], peaks[-1]]:
        found = search.within(plan, limit)
        assert found is not None
        assert estimate_memory(search.profile, found, ADAMW, device_type="cpu").peak_bytes <= limit
        least_s = min(seconds for seconds, memory in known if memory.peak_bytes <= limit)
        assert search.predictor.step_time(found).total_s == pytest.approx(least_s)
    assert search.within(plan, peaks[0] - 1) is None


def test_much_memory_recomputes_nothing_and_the_first_of_equal_blocks_come_first() -> None:
    plan = Plan(training={"batch_size": 16}).resolve(1)
    search = search_for(char_gpt(), plan)
    roomy = search.within(plan, 1e12)
    assert roomy is not None
    assert roomy.activation.strategy == "none"
    peak = estimate_memory(search.profile, plan, ADAMW, device_type="cpu").peak_bytes
    tight = search.within(plan, peak - 1)
    assert tight is not None
    chosen = recomputed_blocks(search.profile, tight)
    assert list(chosen) == sorted(chosen, reverse=True)
    assert chosen[0] is not Recompute.NOTHING


def test_many_kinds_are_decided_kind_by_kind() -> None:
    kinds = [BlockKind(count=9, whole_s=1.0 + number, cheap_s=0.4) for number in range(6)]

    def fits(counts: tuple[tuple[int, int], ...]) -> bool:
        return sum(3 * whole + cheap for whole, cheap in counts) >= 30

    found = least_counts(kinds, fits)
    assert found is not None
    assert found[0] == (7, 0), "the kind with the most blocks may be divided"
    assert set(found[1:]) == {(0, 0), (0, 9)}, "the others are not"


def losses(build: Any, plan: Plan) -> list[float]:
    torch.manual_seed(0)
    model = build()
    inputs = batch_for(model, plan.training.batch_size)
    engine = td.parallelize(model, torch.optim.AdamW, plan, loss_fn=loss_fn)
    share = plan.resolve(torch.distributed.get_world_size()).mesh.data_degree
    place = engine.strategy.data_rank
    rows = plan.training.batch_size // share
    return [engine.step(tuple(one[place * rows : (place + 1) * rows] for one in inputs)) for _ in range(3)]


def budgeted(world: World, sections: dict[str, Any], num_ranks: int, share: float) -> None:
    """`share`: where between everything recomputed and nothing the budget lies."""
    plain = Plan(training={"batch_size": 16}, **sections)
    profile = profile_model(char_gpt(), plain)

    def peak(plan: Plan) -> float:
        return estimate_memory(profile, plan.resolve(num_ranks), ADAMW, device_type="cpu").peak_bytes

    least = peak(plain.replace(activation={"strategy": "uniform", "every_n_layers": 1}))
    budget = least + share * (peak(plain) - least)
    plan = plain.replace(activation={"strategy": "budget", "memory_budget_gb": budget / 1e9})
    measured = max(world.run(measured_peak, char_gpt, plan, num_ranks=num_ranks))
    assert measured <= 1.06 * budget
    assert measured > 1.05 * least, "no more is recomputed than the budget asks for"
    expected = world.run(losses, char_gpt, plain, num_ranks=num_ranks)
    assert world.run(losses, char_gpt, plan, num_ranks=num_ranks) == expected


@pytest.mark.ranks
def test_the_measured_peak_is_within_the_budget_and_losses_are_those_without(world: World) -> None:
    budgeted(world, {"dp": 1, "shard": 2}, 2, 0.6)


@pytest.mark.ranks
@pytest.mark.matrix
@pytest.mark.parametrize("sections", [{"dp": 2}, {"dp": 1, "tp": 2}, {"dp": 1, "pp": 2}], ids=str)
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_every_layout_keeps_to_its_budget(world: World, sections: dict[str, Any], share: float) -> None:
    budgeted(world, sections, 2, share)


def refused(plan: Plan, build: Any) -> str:
    try:
        td.parallelize(build(), torch.optim.AdamW, plan, loss_fn=loss_fn)
    except ConfigurationError as error:
        return error.message
    return ""


@pytest.mark.ranks
def test_a_budget_that_cannot_be_kept_is_refused_with_the_least_that_is_needed(world: World) -> None:
    plan = Plan(training={"batch_size": 16}, activation={"strategy": "budget", "memory_budget_gb": 1e-4})
    assert "with every layer recomputed a rank still needs" in world.run(refused, plan, char_gpt, num_ranks=1)[0]
    plan = Plan(activation={"strategy": "budget", "whole_layers": ["blocks.9"]})
    assert "blocks.9 is not one of the layers that repeat" in world.run(refused, plan, wide, num_ranks=1)[0]


def test_a_budget_without_an_amount_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"needs activation\.memory_budget_gb"):
        Plan(activation={"strategy": "budget"})
    with pytest.raises(ConfigurationError, match=r"blocks\.0 is in activation\.whole_layers and in"):
        Plan(activation={"strategy": "budget", "whole_layers": ["blocks.0"], "selective_layers": ["blocks.0"]})


def test_the_search_recomputes_only_what_it_must() -> None:
    base, limit = Plan(training={"batch_size": 64}), 40e6
    model = char_gpt()
    found = ranked_plans(
        model, world_size=1, machine=machine_named("a100-40gb"), base=base, memory_bytes=limit, reserve=0.0
    )
    best = found.plans[0]
    assert best.plan.activation.strategy == "budget"
    assert best.memory.peak_bytes <= limit
    profile = profile_model(model, base)
    predictor = StepPredictor(profile, machine_named("a100-40gb"), ADAMW)
    assert best.time.total_s == pytest.approx(predictor.step_time(best.plan).total_s)
    for strategy in ("selective", "uniform"):
        other = best.plan.replace(activation={"strategy": strategy, "every_n_layers": 1})
        fits = estimate_memory(profile, other, ADAMW).peak_bytes <= limit
        assert not fits or predictor.step_time(other).total_s > best.time.total_s
