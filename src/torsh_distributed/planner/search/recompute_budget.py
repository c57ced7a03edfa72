"""Which blocks to recompute so that a rank stays within its memory, in the least time: by enumeration.

Blocks repeat, so a choice is how many of each kind are recomputed whole, and of how many all but costly operations. Of
equal blocks the first are taken: what they keep is there the longest. Each pipeline rank is decided by itself, because
its microbatches in flight differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.planner.machine.machine_profile import machine_named
from torsh_distributed.planner.machine.step_time import StepPredictor
from torsh_distributed.planner.machine.this_machine import known_machine
from torsh_distributed.planner.memory.memory_table import GB
from torsh_distributed.planner.memory.optimizer_profile import OptimizerProfile, optimizer_or_assumed
from torsh_distributed.planner.memory.rank_holdings import Recompute
from torsh_distributed.planner.memory.rank_memory import estimate_memory, rank_peak
from torsh_distributed.planner.memory.stage_parts import StagePart, stage_parts
from torsh_distributed.planner.model.model_profile import ModelProfile
from torsh_distributed.planner.model.profiling import profile_model

_MOST_CHOICES = 20_000
_RATES = "a100-80gb"
"""Whose rates say what costs more to recompute, where this machine was not measured."""

Choice = tuple[Recompute, ...]
"""What is recomputed of each block of the model."""


@dataclass(frozen=True)
class BlockKind:
    """Equal blocks of a rank."""

    count: int
    whole_s: float
    """To recompute one of them whole."""
    cheap_s: float
    """To recompute all but costly operations of one."""


Counts = tuple[tuple[int, int], ...]
"""For each kind how many are recomputed whole, and of how many more all but costly operations."""


@dataclass(frozen=True)
class RecomputeSearch:
    """Finds what to recompute for one model, on one machine."""

    profile: ModelProfile
    predictor: StepPredictor
    optimizer: OptimizerProfile
    device_type: str

    def within(self, plan: Plan, limit_bytes: float) -> Plan | None:
        """The plan with the least recomputation whose estimated peak is within the limit on all ranks; None if none is.

        `plan` is valid and resolved for its world.
        """
        found = [Recompute.NOTHING] * self.profile.num_blocks
        for rank, parts in enumerate(stage_parts(self.profile, plan)):
            best = self._of_rank(plan, rank, parts, limit_bytes)
            if best is None:
                return None
            for index in (index for part in parts for index in range(part.first, part.end)):
                found[index] = best[index]
        return with_choice(plan, self.profile, tuple(found))

    def _of_rank(self, plan: Plan, rank: int, parts: Sequence[StagePart], limit_bytes: float) -> Choice | None:
        """The choice for one pipeline rank: that of the least time that fits; of equal times the least recomputed."""
        places: dict[int, list[int]] = {}
        for index in (index for part in parts for index in range(part.first, part.end)):
            places.setdefault(self.profile.order[index], []).append(index)
        kinds = [
            BlockKind(
                len(indices),
                self.predictor.recompute_s(plan, kind, Recompute.WHOLE),
                self.predictor.recompute_s(plan, kind, Recompute.CHEAP),
            )
            for kind, indices in places.items()
        ]

        def choice(counts: Counts) -> Choice:
            found = [Recompute.NOTHING] * self.profile.num_blocks
            for (whole, cheap), indices in zip(counts, places.values(), strict=True):
                for position, index in enumerate(indices[: whole + cheap]):
                    found[index] = Recompute.WHOLE if position < whole else Recompute.CHEAP
            return tuple(found)

        def fits(counts: Counts) -> bool:
            again = choice(counts)
            return limit_bytes >= rank_peak(
                self.profile, plan, self.optimizer, rank=rank, recomputed=again, device_type=self.device_type
            )

        best = least_counts(kinds, fits)
        return None if best is None else choice(best)


def least_counts(kinds: Sequence[BlockKind], fits: Callable[[Counts], bool]) -> Counts | None:
    """The counts of the least time that fit; None if none do.

    Recomputing more never needs more. So all numbers but one are enumerated, the quickest first, and the least of the
    last one that fits is found by bisection. Of more choices than can be tried, as of many kinds of block, those that
    treat blocks of a kind differently are left out, but for the kind with the most blocks.
    """
    everything = tuple((kind.count, 0) for kind in kinds)
    if not fits(everything):
        return None
    if not kinds:
        return everything
    last = max(range(len(kinds)), key=lambda number: kinds[number].count)
    is_fine = math.prod(math.comb(kind.count + 2, 2) for kind in kinds) <= _MOST_CHOICES
    options = [
        [(whole, 0) for whole in range(kind.count + 1)] if number == last else _pairs(kind.count, is_fine=is_fine)
        for number, kind in enumerate(kinds)
    ]
    best: Counts | None = None
    best_s = math.inf
    for taken_s, counts in sorted((_seconds(kinds, one), one) for one in itertools.product(*options)):
        if taken_s >= best_s:
            break
        found = _least_of_last(kinds[last], counts, last, best_s - taken_s, fits)
        if found is not None:
            best, best_s = found, _seconds(kinds, found)
    return best


def _pairs(count: int, *, is_fine: bool) -> list[tuple[int, int]]:
    if not is_fine:
        return [(0, 0), (0, count), (count, 0)]
    return [(whole, cheap) for whole in range(count + 1) for cheap in range(count + 1 - whole)]


def _seconds(kinds: Sequence[BlockKind], counts: Counts) -> float:
    pairs = zip(kinds, counts, strict=True)
    return sum(whole * kind.whole_s + cheap * kind.cheap_s for kind, (whole, cheap) in pairs)


def _least_of_last(
    kind: BlockKind, counts: Counts, last: int, left_s: float, fits: Callable[[Counts], bool]
) -> Counts | None:
    """The least number of cheap ones of the kind `last` that fits in less than `left_s`; None if there is none."""
    whole = counts[last][0]

    def having(cheap: int) -> Counts:
        return (*counts[:last], (whole, cheap), *counts[last + 1 :])

    most = kind.count - whole
    if kind.cheap_s > 0 and math.isfinite(left_s):
        most = min(most, math.ceil(left_s / kind.cheap_s) - 1)
    if most < 0 or not fits(having(most)):
        return None
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(having(middle)) else (middle + 1, high)
    return having(high)


def with_choice(plan: Plan, profile: ModelProfile, choice: Choice) -> Plan:
    """The plan that recomputes so much; where all blocks are alike, by the strategy that says it in a word."""
    kinds = {*choice} or {Recompute.NOTHING}
    plain: dict[Recompute, dict[str, Any]] = {
        Recompute.NOTHING: {"strategy": "none"},
        Recompute.CHEAP: {"strategy": "selective"},
        Recompute.WHOLE: {"strategy": "uniform", "every_n_layers": 1},
    }
    if len(kinds) == 1:
        keys = {**plain[kinds.pop()], "whole_layers": (), "selective_layers": ()}
    else:
        names = list(zip(profile.block_names, choice, strict=True))
        keys = {
            "strategy": "budget",
            "whole_layers": tuple(name for name, one in names if one is Recompute.WHOLE),
            "selective_layers": tuple(name for name, one in names if one is Recompute.CHEAP),
        }
    return plan.replace(activation=keys)


def decide_recomputation(profile: ModelProfile, plan: Plan, optimizer: OptimizerProfile, *, device_type: str) -> Plan:
    """The plan with its layers named, if it has a memory budget; raises ConfigurationError if nothing is within it.

    The plan is valid and resolved for its world.
    """
    budget_gb = plan.activation.memory_budget_gb
    if plan.activation.is_decided or budget_gb is None:
        return plan
    if not profile.num_blocks:
        raise ConfigurationError(
            f'activation.strategy = "budget": {profile.name} has no layers that repeat, so there is nothing to choose',
            hint="put the layers into an nn.ModuleList or nn.Sequential, or set activation.strategy = none",
        )
    machine = known_machine(math.prod(plan.mesh.degrees.values())) or machine_named(_RATES)
    search = RecomputeSearch(profile, StepPredictor(profile, machine, optimizer), optimizer, device_type)
    found = search.within(plan, budget_gb * GB)
    if found is None:
        whole = with_choice(plan, profile, (Recompute.WHOLE,) * profile.num_blocks)
        least = estimate_memory(profile, whole, optimizer, device_type=device_type)
        raise ConfigurationError(
            f"activation.memory_budget_gb {budget_gb:g}: with every layer recomputed a rank still needs"
            f" {least.peak_bytes / GB:.3g} GB in {least.peak.moment} (estimate)",
            hint="raise training.gradient_accumulation, shard the model or allow more; see `torsh plan fit`",
            key="activation.memory_budget_gb",
        )
    return found


def decide_for_training(model: nn.Module, plan: Plan, *, optimizer: str, device_type: str, example: Any) -> Plan:
    """`decide_recomputation` for a model that is about to be trained; its values and the random state stay.

    `optimizer` is the name of its class; `example` a microbatch of inputs, or None.
    """
    with torch.random.fork_rng(devices=[]):
        profile = profile_model(model, plan, example=example)
    return decide_recomputation(profile, plan, optimizer_or_assumed(optimizer)[0], device_type=device_type)
