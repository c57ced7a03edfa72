"""Draws a schedule: a row for each rank, time to the right, a box for each action."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.parallel.pipeline.schedule import Action, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"F": "#4c78a8", "B": "#f58518", "I": "#e8a33d", "W": "#72b7b2", "C": "#b279a2", "U": "#54a24b"}
_NAMES = {
    "F": "F forward",
    "B": "B backward",
    "I": "I backward, inputs",
    "W": "W backward, weights",
    "C": "C communication",
    "U": "U update",
}
_STYLES = {
    "F": "on blue",
    "B": "on dark_orange3",
    "I": "on yellow4",
    "W": "on cyan4",
    "C": "on magenta",
    "U": "on green4",
}


def schedule_text(timeline: Timeline, *, width: int = 100) -> Group:
    """The schedule for a terminal, `width` characters wide.

    A box shows the action's kind and, if it fits, its microbatch, in the colour of the kind; dots are bubbles.
    """
    if not timeline.actions:
        return Group(Text("nothing was scheduled"))
    start = min(action.start for action in timeline.actions)
    scale = width / timeline.span
    lines, names = [], _row_names(timeline)
    indent = max(8, *map(len, names)) if names else 8
    for rank in range(timeline.num_ranks):
        line, place = Text(f"{names[rank]:<{indent}}"), 0
        for action in sorted(_of(timeline, rank), key=lambda one: one.start):
            first, last = round((action.start - start) * scale), round((action.end - start) * scale)
            line.append("·" * max(0, first - place), style="dim")
            cells = max(0, last - max(first, place))
            label = _label(action)
            line.append(f"{label if len(label) <= cells else action.kind:^{cells}}"[:cells], style=_STYLES[action.kind])
            place = max(place, last)
        lines.append(line)
    legend = Text(" " * indent)
    for kind in _kinds(timeline):
        legend.append(f" {_NAMES[kind]} ", style=_STYLES[kind]).append("  ")
    legend.append(f"{timeline.idle_name} {timeline.bubble:.1%}")
    return Group(*lines, legend)


def draw_schedule(timeline: Timeline, path: str | Path, *, title: str | None = None) -> Path:
    """Write the schedule as a PNG and return its path; needs matplotlib."""
    figure = _figure(timeline, title)
    target = Path(path)
    figure.savefig(target, dpi=120)
    return target


def _figure(timeline: Timeline, title: str | None) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FeatureNotAvailable(
            "drawing a schedule needs matplotlib", hint='pip install "torsh-distributed[plot]"'
        ) from error
    figure = Figure(figsize=(12, 0.8 + 0.5 * timeline.num_ranks), layout="constrained")
    paint_schedule(figure.subplots(), timeline, title)
    return figure


def paint_schedule(axes: Axes, timeline: Timeline, title: str | None = None) -> None:
    """Draw the schedule into matplotlib axes."""
    start = min((action.start for action in timeline.actions), default=0.0)
    for rank in range(timeline.num_ranks):
        for action in _of(timeline, rank):
            length = action.end - action.start
            axes.barh(
                rank, length, left=action.start - start, height=0.8, color=_COLORS[action.kind], edgecolor="white"
            )
            if length > timeline.span / 60:
                middle = action.start - start + length / 2
                axes.text(middle, rank, _label(action), ha="center", va="center", color="white", fontsize=7)
    handles = [axes.barh(0, 0, color=_COLORS[kind], label=_NAMES[kind]) for kind in _kinds(timeline)]
    if handles:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, frameon=False, fontsize=8)
    axes.set_yticks(range(timeline.num_ranks), _row_names(timeline))
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.span or 1.0)
    axes.set_title(f"{title + ': ' if title else ''}{timeline.idle_name} {timeline.bubble:.1%}", fontsize=10)


def _row_names(timeline: Timeline) -> list[str]:
    return list(timeline.row_names) or [f"rank {rank}" for rank in range(timeline.num_ranks)]


def _kinds(timeline: Timeline) -> list[str]:
    return sorted({action.kind for action in timeline.actions}, key="FBIWCU".index)


def _label(action: Action) -> str:
    return action.kind if action.kind in "CU" else f"{action.kind}{action.microbatch}"


def _of(timeline: Timeline, rank: int) -> list[Action]:
    return [action for action in timeline.actions if action.rank == rank]
