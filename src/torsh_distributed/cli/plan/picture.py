"""A plan as a PNG: its mesh as a grid of ranks, and below it the schedule of its pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torsh_distributed.cli.plan.mesh_drawing import split_axes
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.parallel.mesh.layout import MeshLayout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from torsh_distributed.parallel.pipeline import Timeline

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
