"""Trains a model of the zoo on an axis and compares its losses with one process; makes the table of the guide.

`python -m tests.parallel.models --keep --write` runs every cell and writes the table. A further axis is one entry in
AXES.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tests.bed.heavy_imports import TRANSFORMERS
from tests.bed.world import World
from tests.parallel.models.verdict_record import Found, LibraryRecord, found_in, origin
from tests.parallel.models.zoo import BATCH, SPECIMENS, Batch, Specimen
from torsh_distributed.errors import TorshError
from torsh_distributed.plan import MeshConfig, PipelineConfig, Plan, TrainingConfig
from torsh_distributed.train import parallelize

STEPS, TOLERANCE = 5, 1e-4
GUIDE = Path(__file__).parents[3] / "docs/guides/your-model.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"


@dataclass(frozen=True)
class Axis:
    """One column: the plan on a number of ranks, and the models it is for."""

    plan: Callable[[int], Plan]
    applies: Callable[[Specimen], bool] = lambda _: True


def plan_of(mesh: MeshConfig, **sections: object) -> Plan:
    """A plan whose batch is that of the zoo."""
    return Plan(mesh=mesh, training=TrainingConfig(steps=STEPS, batch_size=BATCH), **sections)  # type: ignore[arg-type]


AXES: dict[str, Axis] = {
    "dp": Axis(lambda ranks: plan_of(MeshConfig(dp=ranks))),
    "shard": Axis(lambda ranks: plan_of(MeshConfig(dp=1, shard=ranks))),
    "tp": Axis(lambda ranks: plan_of(MeshConfig(dp=1, tp=ranks))),
    "ep": Axis(lambda ranks: plan_of(MeshConfig(dp=1, ep=ranks)), lambda one: one.has_experts),
    "pp": Axis(lambda ranks: plan_of(MeshConfig(dp=1, pp=ranks))),
    "cp": Axis(lambda ranks: plan_of(MeshConfig(dp=1, cp=ranks))),
}


@dataclass(frozen=True)
class Cell:
    """What became of one model on one axis: its losses, or why it was refused; `failure` is neither."""

    losses: tuple[float, ...] = ()
    refusal: str = ""
    failure: str = ""

    def verdict(self, expected: Sequence[float]) -> str:
        """In a word for the table: equal, the refusal, or what went wrong."""
        if self.failure:
            return f"FAILS: {self.failure}"
        if self.refusal:
            return f"refused: {self.refusal}"
        worst = max(abs(one - other) for one, other in zip(self.losses, expected, strict=True))
        return "equal" if worst <= TOLERANCE else f"DIFFERS by {worst:.1e}"


def batches(specimen: Specimen) -> list[Batch]:
    """The batches of every step, the same in every process."""
    generator = torch.Generator().manual_seed(11)
    return [specimen.batch(generator) for _ in range(STEPS)]


def train_alone(name: str) -> list[float]:
    """Losses of plain torch in one process."""
    specimen = SPECIMENS[name]
    torch.manual_seed(5)
    model = specimen.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for batch in batches(specimen):
        optimizer.zero_grad()
        output = model(**batch)
        loss = getattr(output, "loss", output)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_on(name: str, plan: Plan) -> Cell:
    """The same on every rank of a world, as the plan says."""
    specimen = SPECIMENS[name]
    torch.manual_seed(5)
    model = specimen.build()
    try:
        engine = parallelize(model, torch.optim.AdamW(model.parameters(), lr=2e-3), plan)
        rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
        rows = slice(rank * BATCH // degree, (rank + 1) * BATCH // degree)
        losses = [engine.step({key: value[rows] for key, value in batch.items()}) for batch in batches(specimen)]
    except TorshError as error:
        return Cell(refusal=error.message)
    return Cell(losses=tuple(losses))


def train_cell(name: str, axis: str) -> Cell:
    """One cell on the ranks of this world; an error that is not ours is a failure, on all ranks or none."""
    plan = AXES[axis].plan(dist.get_world_size())
    if plan.mesh.pp > 1:
        plan = plan.replace(
            pipeline=PipelineConfig(schedule="gpipe", num_microbatches=SPECIMENS[name].num_microbatches)
        )
    try:
        return train_on(name, plan)
    except Exception as error:
        return Cell(failure=f"{type(error).__name__}: {str(error).splitlines()[0]}\n{traceback.format_exc()}")


def all_alone(names: Sequence[str]) -> dict[str, list[float]]:
    """Losses of one process for all these models; each rank trains some of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {name: train_alone(name) for name in names[rank::size]}
    everyone: list[dict[str, list[float]]] = [{} for _ in range(size)]
    dist.all_gather_object(everyone, mine)
    return {name: losses for one in everyone for name, losses in one.items()}


def train_cells(cells: list[tuple[str, str]]) -> list[str]:
    """Several cells in one world, in words."""
    expected = all_alone(list(dict.fromkeys(name for name, _ in cells)))
    return [train_cell(name, axis).verdict(expected[name]) for name, axis in cells]


def cells_of(names: Sequence[str], axes: Sequence[str]) -> list[tuple[str, str]]:
    """The cells of these models and axes that apply."""
    return [(name, axis) for name in names for axis in axes if AXES[axis].applies(SPECIMENS[name])]


def verdicts(
    world: World, cells: Sequence[tuple[str, str]], num_ranks: int, *, timeout_s: float = 110
) -> dict[tuple[str, str], str]:
    """What became of every cell, in words; `equal` on all ranks or the first other verdict."""
    by_rank = world.run(
        train_cells, list(cells), num_ranks=num_ranks, backend="torsh", timeout_s=timeout_s, imports=TRANSFORMERS
    )
    return {
        cell: next((one for one in said if one != "equal"), "equal")
        for cell, said in zip(cells, zip(*by_rank, strict=True), strict=True)
    }


def page_of(record: Mapping[str, LibraryRecord]) -> str:
    """What the guide says: the table of the whole record, and what it was run with."""
    return f"{table(found_in(record), tuple(SPECIMENS), tuple(AXES))}\n{origin(record)}\n"


def table(found: Found, names: Sequence[str], axes: Sequence[str]) -> str:
    """Markdown: a row for each model, a column for each axis, and the reasons of refusals below."""
    reasons: list[str] = []
    lines = ["| | " + " | ".join(axes) + " |", "|---" * (len(axes) + 1) + "|"]
    for name in names:
        row = []
        for axis in axes:
            said = {ranks: cells[name, axis] for ranks, cells in found.items() if (name, axis) in cells}
            row.append(_cell(said, reasons) if said or not AXES[axis].applies(SPECIMENS[name]) else "not run")
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


def _cell(said: dict[int, str], reasons: list[str]) -> str:
    if not said:
        return ""
    said = {ranks: re.sub(r"(mesh\.\w+) \d+", r"\1", verdict) for ranks, verdict in said.items()}
    if set(said.values()) == {"equal"}:
        return "equal"
    parts = []
    for ranks, verdict in said.items():
        text = verdict
        if verdict.startswith("refused: "):
            reason = verdict.removeprefix("refused: ")
            if reason not in reasons:
                reasons.append(reason)
            text = f"refused ({reasons.index(reason) + 1})"
        parts.append(text if len(set(said.values())) == 1 else f"{text} on {ranks}")
        if len(set(said.values())) == 1:
            break
    return ", ".join(parts)
