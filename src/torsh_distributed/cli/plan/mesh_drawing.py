"""The mesh as a text grid: which rank is where, and what each axis means for what a rank holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.parallel.mesh.layout import MeshLayout
from torsh_distributed.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from torsh_distributed.parallel.pipeline import Timeline


_MAX_COLUMNS = 8


def draw_mesh(layout: MeshLayout) -> Table:
    """Ranks as a grid: inner axes across, outer ones down. A cell is `rank·part`, its part of every batch."""
    down, across = split_axes(layout)
    columns = list(_places(layout, across))
    rows = [columns[start : start + _MAX_COLUMNS] for start in range(0, len(columns), _MAX_COLUMNS)]
    is_folded = len(rows) > 1
    table = Table(box=box.SIMPLE, pad_edge=False)
    for axis in down + (across if is_folded else []):
        table.add_column(axis, no_wrap=True)
    for place in rows[0]:
        table.add_column("" if is_folded else _label(place), justify="right", no_wrap=True)
    for outer in _places(layout, down):
        for places in rows:
            ranks = [layout.rank_at(**outer, **place) for place in places]
            ends = [f"{places[0][axis]} to {places[-1][axis]}" for axis in across] if is_folded else []
            table.add_row(*map(str, outer.values()), *ends, *(f"{rank}·{layout.data_part(rank)}" for rank in ranks))
    return table


def describe_axes(plan: Plan, layout: MeshLayout) -> Iterator[str]:
    """A line for each axis in use: what its ranks share, and what each has for itself."""
    parts = {
        "full_shard": "parameters, gradients and optimizer state",
        "hybrid_shard": "parameters, gradients and optimizer state",
        "shard_grad_op": "gradients and optimizer state",
        "shard_optimizer": "optimizer state",
        "no_shard": "nothing",
    }[plan.fsdp.strategy]
    meanings = {
        "dp": "{n} replicas, each on its own part of the batch",
        "pp": "{n} pipeline stages, each with some of the layers",
        "shard": f"each rank keeps 1/{{n}} of {parts}, and has its own part of the batch",
        "ep": "each rank keeps 1/{n} of the experts, and has its own part of the batch",
        "cp": "each rank has 1/{n} of every sequence",
        "tp": "each rank keeps 1/{n} of every split layer, and sees the same samples",
    }
    yield "a cell is rank·part of the batch; ranks count fastest along " + (layout.used_axes or ("dp",))[-1]
    for axis in layout.used_axes:
        yield f"{axis:<6}{meanings[axis].format(n=layout.degree(axis))}"


def split_axes(layout: MeshLayout) -> tuple[list[str], list[str]]:
    """Axes that go down and axes that go across: as many inner ones as fit the width, but never all of two."""
    down, across = list(layout.used_axes), list[str]()
    while down and (not across or (len(down) > 1 and layout.degree(down[-1], *across) <= _MAX_COLUMNS)):
        across.insert(0, down.pop())
    return down, across


def _places(layout: MeshLayout, axes: list[str]) -> Iterator[dict[str, int]]:
    for indices in itertools.product(*(range(layout.degree(axis)) for axis in axes)):
        yield dict(zip(axes, indices, strict=True))


def _label(place: dict[str, int]) -> str:
    return " ".join(f"{axis} {index}" for axis, index in place.items())


_CELL_INCHES = 0.45


def draw_plan(layout: MeshLayout, timeline: Timeline | None, path: Path, *, title: str | None = None) -> Path:
    """Write mesh and schedule (None: there is no pipeline) as a PNG and return its path; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FeatureNotAvailable(
            "drawing a plan needs matplotlib", hint='pip install "torsh-distributed[plot]"'
        ) from error
    rows = layout.degree(*split_axes(layout)[0])
    heights = [1.0 + _CELL_INCHES * rows]
    if timeline is not None:
        heights.append(1.3 + 0.5 * timeline.num_ranks)
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    # A grid that does not stretch: one row of axes for the mesh, one for the schedule.
    parts = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    _paint_mesh(parts[0], layout)
    if timeline is not None:
        from torsh_distributed.parallel.pipeline.schedule_drawing import paint_schedule

        paint_schedule(parts[1], timeline, title)
    figure.savefig(path, dpi=120)
    return path


def _paint_mesh(axes: Axes, layout: MeshLayout) -> None:
    """Ranks as boxes, coloured by their part of the batch: inner axes to the right, outer ones down."""
    down, across = split_axes(layout)
    columns = layout.degree(*across)
    for rank in range(layout.world_size):
        found = layout.coordinates(rank)
        row, column = (_index(layout, found, some) for some in (down, across))
        part = layout.data_part(rank)
        axes.barh(row, 0.96, left=column + 0.02, height=0.9, color=f"C{part % 10}", edgecolor="white")
        axes.text(column + 0.5, row, f"{rank}·{part}", ha="center", va="center", color="white", fontsize=8)
    axes.set_xlim(0, max(columns, 6))
    axes.set_yticks(range(layout.degree(*down)), _labels(layout, down))
    axes.set_xticks([column + 0.5 for column in range(columns)], _labels(layout, across), fontsize=7)
    axes.xaxis.tick_top()
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title(f"{layout.config.equation}: rank·part of the batch", fontsize=10)


def _index(layout: MeshLayout, found: dict[str, int], some: list[str]) -> int:
    index = 0
    for axis in some:
        index = index * layout.degree(axis) + found[axis]
    return index


def _labels(layout: MeshLayout, some: list[str]) -> list[str]:
    """The labels of the places along these axes, in order."""
    labels = [""]
    for axis in some:
        labels = [f"{label} {axis} {index}".strip() for label in labels for index in range(layout.degree(axis))]
    return labels
