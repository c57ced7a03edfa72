"""The best plan for a model on some ranks of a machine: what `torsh plan auto` and `Plan.auto` give."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.planner.machine.machine_profile import MachineProfile, machine_named
from torsh_distributed.planner.machine.step_text import step_text
from torsh_distributed.planner.machine.this_machine import this_machine
from torsh_distributed.planner.memory.memory_table import GB
from torsh_distributed.planner.memory.optimizer_profile import optimizer_named, optimizer_or_assumed
from torsh_distributed.planner.model.model_profile import ModelProfile
from torsh_distributed.planner.model.profiling import profile_model
from torsh_distributed.planner.search.model_limits import ModelLimits
from torsh_distributed.planner.search.ranking import PlanSearch, RankedPlan, Ranking

DEFAULT_RESERVE = 0.05


def ranked_plans(
    model: nn.Module,
    *,
    world_size: int,
    machine: MachineProfile,
    base: Plan | None = None,
    optimizer: str = "AdamW",
    memory_bytes: float | None = None,
    reserve: float = DEFAULT_RESERVE,
    sequence: int | None = None,
    mean_sequence: int | None = None,
    example: Any = None,
    is_simple: bool = False,
    batch: Literal["auto"] | None = None,
) -> Ranking:
    """Every legal layout of `world_size` ranks that fits, the fastest first, and why the others do not.

    `base` gives batch, formats and all that the search leaves alone. `reserve` is the share of a device's memory
    that stays free. Where lengths differ, `sequence` is the longest and decides what fits, `mean_sequence` that of a
    mean sample with its padding and decides how long a step takes. With `batch = "auto"` a layout takes the microbatch
    that is the fastest of those that fit, and as many passes as the wanted batch needs, which may then be a little
    larger: that of `base`, else 32·sqrt(ranks).
    """
    chosen = base or Plan()
    if batch == "auto" and not names_batch(chosen):
        chosen = chosen.replace(training={"batch_size": round(32 * math.sqrt(world_size))})
    search = PlanSearch(
        profile=profile_model(model, chosen, sequence=sequence, example=example),
        mean_profile=_mean_profile(model, chosen, mean_sequence, example),
        base=chosen,
        machine=machine,
        optimizer=optimizer_named(optimizer),
        world_size=world_size,
        limit_bytes=(memory_bytes or machine.memory_bytes) * (1 - reserve),
        limits=ModelLimits(model),
        is_simple=is_simple,
        is_batch_free=batch == "auto",
    )
    return search.rank()


def names_batch(plan: Plan) -> bool:
    """Whether its user has said how many samples a step has: the default is no choice for any number of ranks."""
    return "batch_size" in plan.training.model_fields_set


def _mean_profile(model: nn.Module, plan: Plan, mean_sequence: int | None, example: Any) -> ModelProfile | None:
    if mean_sequence is None:
        return None
    if example is not None:
        raise InvalidArgument(
            "a mean length cannot be told from an example, whose tensors have one length",
            hint="leave --mean-sequence out, and give an example of the longest samples",
        )
    return profile_model(model, plan, sequence=mean_sequence)


def best_plan(
    model: nn.Module, *, world_size: int = 1, machine: str | None = None, base: Plan | None = None, **options: Any
) -> Plan:
    """The plan that `ranked_plans` has first. `machine` is a description by name or file; left out: this machine.

    Where `base` names no batch, the memory left decides. Raises InvalidArgument, with the nearest plan, if none fits.
    """
    if base is None or not names_batch(base):
        options.setdefault("batch", "auto")
    chosen = this_machine(world_size) if machine is None else machine_named(machine)
    return _first(ranked_plans(model, world_size=world_size, machine=chosen, base=base, **options), chosen).plan


def plan_and_reason(
    model: nn.Module, *, world_size: int, ranks_per_node: int, base: Plan, optimizer: str, example: Any = None
) -> tuple[Plan, str]:
    """The best plan for a job that is about to train on this machine and others like it, and what is predicted of it.

    `optimizer` is the name of its class. The model's values and the random state stay as they are.
    """
    machine = this_machine(ranks_per_node)
    known, note = optimizer_or_assumed(optimizer.rpartition(".")[2])
    with torch.random.fork_rng(devices=[]):
        ranking = ranked_plans(
            model, world_size=world_size, machine=machine, base=base, optimizer=known.name, example=example
        )
    best = _first(ranking, machine)
    told = (
        f"{best.plan.mesh.equation} ranks, {best.memory.num_samples} samples in a pass, activations"
        f" {best.plan.activation.strategy}; estimated {step_text(best.time.total_s)} a step and"
        f" {best.memory.peak_bytes / GB:.2f} GB on a rank, the best of {ranking.num_tried} plans on {machine.name}"
    )
    return best.plan, f"{told}; {note}" if note else told


def _first(ranking: Ranking, machine: MachineProfile) -> RankedPlan:
    if not ranking.plans:
        raise InvalidArgument(no_plan(ranking, machine), hint=nearest(ranking))
    return ranking.plans[0]


def no_plan(ranking: Ranking, machine: MachineProfile) -> str:
    """That no plan fits, in a sentence."""
    room = f"{ranking.limit_bytes / GB:.4g} GB that a rank may use of {machine.name}"
    return f"none of {ranking.num_tried} plans fits into the {room}"


def nearest(ranking: Ranking) -> str:
    """The plan that is nearest to fitting; else the first reason why there is none."""
    if ranking.smallest is None:
        return ranking.rejections[0].reason if ranking.rejections else "there is no layout of so many ranks"
    size, mesh = ranking.smallest[1].peak_bytes / GB, ranking.smallest[0].mesh.equation
    return f"the nearest needs {size:.2f} GB on a rank: {mesh}; take more or larger devices, or a smaller batch"
