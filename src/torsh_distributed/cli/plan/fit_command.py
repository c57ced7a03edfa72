"""`torsh plan fit`: does a model fit, with which plan, and what would close the gap."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.plan import Plan

if TYPE_CHECKING:
    from rich.table import Table

    from torsh_distributed.planner.memory.closing_the_gap import MemoryQuestion
    from torsh_distributed.planner.memory.memory_table import MemoryTable
    from torsh_distributed.planner.memory.optimizer_profile import OptimizerProfile
    from torsh_distributed.planner.model.model_profile import ModelProfile

GB = 1e9
ASSUMED_OPTIMIZER = "AdamW"
_UNITS = {"gb": 1e9, "g": 1e9, "gib": 2**30, "mb": 1e6, "m": 1e6, "mib": 2**20, "tb": 1e12, "t": 1e12}
_SHOWN_RANKS = 6

ModelName = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="module:function, a folder with a config.json, or a model of transformers."),
]
PlanOption = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="The plan; else $TORSH_PLAN.")]
NumGpus = Annotated[int | None, typer.Option("--gpus", min=1, metavar="N", help="Number of ranks, each with a device.")]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="Memory of one device, such as 80GB. Default: that of this machine's."
    ),
]
Sequence = Annotated[
    int | None,
    typer.Option(
        "--sequence", min=1, metavar="TOKENS", help="Tokens of a sample; of the longest sample if lengths differ."
    ),
]
MeanSequence = Annotated[
    int | None,
    typer.Option(
        "--mean-sequence",
        min=1,
        metavar="TOKENS",
        help="Mean tokens of a sample with its padding, where batches differ: for times; memory is for --sequence.",
    ),
]
OptimizerName = Annotated[
    str | None, typer.Option("--optimizer", metavar="NAME", help="Optimizer of torch.optim. Default: AdamW.")
]
Reserve = Annotated[
    float,
    typer.Option(min=0, max=0.9, help="Share of the device that stays free: its context, communicators, fragments."),
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key, such as mesh.shard=8. Repeatable.")
]


def memory_bytes(text: str) -> float:
    """The bytes of a size such as 80GB, 24GiB or 80 (GB)."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    unit = match.group(2).lower() if match else ""
    if match is None or (unit and unit not in _UNITS) or float(match.group(1)) <= 0:
        raise ConfigurationError(f"--memory {text} is not a size", hint="such as 80GB, 24GiB or 512MB")
    return float(match.group(1)) * _UNITS.get(unit, GB)


def device_bytes(memory: str | None) -> float:
    """The memory of one device: as given, or of this machine's first GPU."""
    if memory is not None:
        return memory_bytes(memory)
    import torch

    if not torch.cuda.is_available():
        raise FeatureNotAvailable(
            "the memory of a device is not known: this machine has no GPU", hint="say how large it is: --memory 80GB"
        )
    return float(torch.cuda.get_device_properties(0).total_memory)


def fit(
    model: ModelName,
    plan: PlanOption = None,
    gpus: NumGpus = None,
    memory: Memory = None,
    sequence: Sequence = None,
    optimizer: OptimizerName = None,
    reserve: Reserve = 0.05,
    assignments: Assignments = None,
) -> None:
    """Estimate the memory of every rank before anything runs; exit with status 1 if the plan does not fit.

    The model gets no memory: each distinct block is traced once on tensors without values. The table has the peak of
    every pipeline rank in named terms; if it is above the device, the changes of the plan that would close the gap.
    """
    limit = device_bytes(memory)
    chosen = Plan.compose(plan, environ=os.environ, command_line=assignments or ())
    world = gpus or _own_size(chosen)
    chosen.validate(world)
    from rich.console import Console

    from torsh_distributed.planner.memory.closing_the_gap import MemoryQuestion
    from torsh_distributed.planner.model.model_source import find_model
    from torsh_distributed.planner.model.profiling import profile_model
    from torsh_distributed.planner.search.recompute_budget import decide_recomputation

    found = find_model(model)
    resolved = chosen.resolve(world)
    profile = profile_model(found.model, resolved, sequence=sequence, example=found.example)
    known, told = counted_optimizer(optimizer)
    resolved = decide_recomputation(profile, resolved, known, device_type="cuda")
    question = MemoryQuestion(profile, known, world, limit * (1 - reserve))
    table = question.table(resolved)
    console = Console()
    console.print(
        f"{profile.name}: {_in_words(profile)}; loss: {profile.loss_note}; {told}; {resolved.mesh.equation}"
        f" rank{'s' if world > 1 else ''}, {table.num_samples} samples in a microbatch",
        highlight=False,
        soft_wrap=True,
    )
    for note in profile.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)
    console.print(_terms(table), highlight=False)
    for line in _verdict(question, resolved, table, limit, reserve):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if table.peak_bytes > question.limit_bytes:
        raise typer.Exit(1)


def _in_words(profile: ModelProfile) -> str:
    """The size of a model, with what it has of blocks and tokens."""
    numel = profile.all_params.numel()
    sizes = ((1e12, "trillion "), (1e9, "billion "), (1e6, "million "), (1e3, "thousand "))
    scale, unit = next((one for one in sizes if numel >= one[0]), (1.0, ""))
    blocks = f" in {profile.num_blocks} blocks ({len(profile.blocks)} distinct)" if profile.num_blocks else ""
    tokens = f", {profile.tokens_per_sample} tokens a sample" if profile.tokens_per_sample > 1 else ""
    return f"{numel / scale:.3g} {unit}parameters{blocks}{tokens}"


def counted_optimizer(given: str | None) -> tuple[OptimizerProfile, str]:
    """The optimizer that is counted, and in words whether it is the user's: its state may be most of the memory."""
    from torsh_distributed.planner.memory.optimizer_profile import optimizer_kind, optimizer_named, optimizer_or_assumed

    if given is None:
        return optimizer_named(ASSUMED_OPTIMIZER), f"{ASSUMED_OPTIMIZER} (assumed: --optimizer names yours)"
    kind = optimizer_kind(given)
    counted, note = optimizer_or_assumed(given)
    return counted, f"{kind.__name__} ({note})" if note else kind.__name__


def _own_size(plan: Plan) -> int:
    """The number of ranks that a plan is for, where all its degrees are numbers; else one."""
    degrees = plan.mesh.degrees.values()
    size = 1
    for degree in degrees:
        size *= max(1, degree)
    return size


def _terms(table: MemoryTable) -> Table:
    from rich.table import Table

    from torsh_distributed.planner.memory.memory_table import TERMS

    ranks = list(table.ranks)
    if len(ranks) > _SHOWN_RANKS:
        ranks = [one for one in ranks if one in (ranks[0], table.peak, ranks[-1])]
    shown = Table("GB (estimate)", *(_heading(one.rank, len(table.ranks)) for one in ranks), "what")
    for column in shown.columns[1:-1]:
        column.justify = "right"
    for term, meaning in TERMS.items():
        if any(term in one.terms for one in ranks):
            shown.add_row(term, *(f"{one.terms.get(term, 0) / GB:.3f}" for one in ranks), meaning)
    shown.add_section()
    shown.add_row("peak", *(f"{one.total_bytes / GB:.3f}" for one in ranks), "of what the allocator gives out")
    shown.add_row("in", *(one.moment for one in ranks), "")
    shown.add_row("of", *(one.what for one in ranks), "")
    return shown


def _heading(rank: int, count: int) -> str:
    return "every rank" if count == 1 else f"pp {rank}"


def _verdict(question: MemoryQuestion, plan: Plan, table: MemoryTable, limit: float, reserve: float) -> Iterator[str]:
    usable, peak = question.limit_bytes, table.peak_bytes
    room = f"{usable / GB:.1f} GB ({limit / GB:.1f} GB without the {reserve:.0%} that --reserve keeps free)"
    if peak <= usable:
        yield f"fits: {peak / GB:.2f} GB of {room}; {(usable - peak) / GB:.2f} GB are left"
        return
    yield f"does not fit: {peak / GB:.2f} GB of {room}; {(peak - usable) / GB:.2f} GB are missing"
    yield from _by_recomputing(question, plan)
    singles, together = question.closing(plan)
    for change in singles[:5]:
        yield f"  fits with {change.text}: {change.peak_bytes / GB:.2f} GB"
    if together is not None and together.peak_bytes <= usable:
        yield f"  fits with all of: {together.text}: {together.peak_bytes / GB:.2f} GB"
    elif together is not None:
        missing = (together.peak_bytes - usable) / GB
        yield f"  no change of the plan is enough on these devices; nearest, {missing:.2f} GB short: {together.text}"


def _by_recomputing(question: MemoryQuestion, plan: Plan) -> Iterator[str]:
    """The least recomputation after which the plan fits, if there is any."""
    from torsh_distributed.planner.search.recompute_budget import decide_recomputation

    budget_gb = question.limit_bytes / GB
    keys = {"strategy": "budget", "memory_budget_gb": budget_gb, "whole_layers": (), "selective_layers": ()}
    try:
        found = decide_recomputation(
            question.profile, plan.replace(activation=keys), question.optimizer, device_type=question.device_type
        )
    except ConfigurationError:  # not even with everything recomputed, or nothing repeats
        return
    chosen, blocks = found.activation, question.profile.num_blocks
    num_whole, num_cheap = len(chosen.whole_layers), len(chosen.selective_layers)
    if chosen.strategy == "budget":
        yield (
            f'  fits with activation.strategy = "budget", memory_budget_gb = {budget_gb:.4g}: of {blocks} layers'
            f" {num_whole} are recomputed whole and {num_cheap} without costly operations:"
            f" {question.table(found).peak_bytes / GB:.2f} GB"
        )
