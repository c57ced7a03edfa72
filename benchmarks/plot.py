"""A result as a plot: bars for a list of workloads, curves if the rows have a place on an axis."""

from __future__ import annotations

import hashlib
import json
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import OURS, Measurement, Row, Unit
from benchmarks.result import Result, record_of
from benchmarks.wording import quantity, ratio, tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _FAINT = "#22272e", "#8b949e"
_OURS_COLOUR = "#3f51b5"
_RIVAL_COLOURS = ("#b0b8c4", "#d8b26e", "#8fb8a8", "#c79aa6", "#a3a0c8")
_BAR_INCHES = 0.24
_WIDTH_INCHES = 8.6
# Above this spread the smallest bar would vanish on a linear axis.
_LOG_SPREAD = 25


def fingerprint(result: Result) -> str:
    """A digest of the numbers, kept inside the plot to check that the two belong together."""
    return hashlib.sha256(json.dumps(record_of(result), sort_keys=True).encode()).hexdigest()


def save_plot(result: Result, folder: Path) -> Path:
    """Draw `<case>.png`. Needs the [plot] extra."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit('plots need matplotlib: pip install "torsh-distributed[plot]"') from error

    panels = [
        [row for row in result.rows if row.unit is unit] for unit in dict.fromkeys(row.unit for row in result.rows)
    ]
    is_curve = all(row.x is not None for row in result.rows)
    heights = [3.4 if is_curve else _bars_inches(rows) for rows in panels]
    subtitle = textwrap.wrap(result.about, 110)
    head_inches, foot_inches = 0.95 + 0.17 * len(subtitle), 0.45
    total_inches = head_inches + sum(heights) + 0.55 * len(panels) + foot_inches
    figure = Figure(figsize=(_WIDTH_INCHES, total_inches), facecolor="white")
    left = 0.09 if is_curve else 0.30
    grid = figure.add_gridspec(
        len(panels), 1, height_ratios=heights, left=left, right=0.86, hspace=0.4,
        top=1 - head_inches / total_inches, bottom=(foot_inches + 0.35) / total_inches,
    )  # fmt: skip
    colours = dict(zip(result.rivals, _RIVAL_COLOURS * len(result.rivals), strict=False))
    for index, rows in enumerate(panels):
        axes = figure.add_subplot(grid[index])
        _style(axes)
        (_draw_curves if is_curve else _draw_bars)(axes, rows, colours)
        if is_curve:
            axes.set_xlabel(result.x_label, color=_FAINT, fontsize=9)
    figure.text(0.02, 1 - 0.30 / total_inches, result.title, fontsize=14, fontweight="bold", color=_INK, va="center")
    figure.text(0.02, 1 - 0.48 / total_inches, "\n".join(subtitle), fontsize=8.5, color=_FAINT, va="top")
    _legend(figure, colours, y=1 - (0.66 + 0.17 * len(subtitle)) / total_inches)
    machine = result.machine
    where = (
        f"{machine.cpu}, {machine.num_cores} cores · {machine.kernel} · Python {machine.python}, torch {machine.torch}"
    )
    figure.text(0.02, 0.16 / total_inches, f"{where} · {machine.date[:10]}", fontsize=7.5, color=_FAINT, va="center")
    path = folder / f"{result.case}.png"
    figure.savefig(path, dpi=150, metadata={"Source": fingerprint(result), "Software": None})
    return path


def _legend(figure: Any, colours: dict[str, str], *, y: float) -> None:
    x = 0.02
    for name, colour in {OURS: _OURS_COLOUR, **colours}.items():
        figure.text(x, y, "■", fontsize=11, color=colour, va="center")
        figure.text(x + 0.018, y, name, fontsize=9, color=_INK, va="center")
        x += 0.045 + 0.0105 * len(name)


def _style(axes: Axes) -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=9, colors=_INK)
    axes.set_axisbelow(True)


def _bars_inches(rows: list[Row]) -> float:
    return sum(_BAR_INCHES * (1 + len(row.rivals)) + 0.16 for row in rows)


def _draw_bars(axes: Axes, rows: list[Row], colours: dict[str, str]) -> None:
    """Horizontal bars, one group per row, with the number at the end of each bar."""
    measured = [each for row in rows for each in (row.ours, *row.rivals.values())]
    medians = [each.median for each in measured]
    farthest = max([*medians, *(value for each in measured for value in each.samples)])
    is_log = max(medians) / min(medians) > _LOG_SPREAD
    if is_log:
        axes.set_xscale("log")
        start = 10 ** math.floor(math.log10(min(medians)) - 0.3)
        axes.set_xlim(start, farthest * 1.1)
    else:
        start = 0.0
        axes.set_xlim(0, farthest * 1.02)
    position, ticks = 0.0, []
    for row in rows:
        first = position
        for name, each in {OURS: row.ours, **row.rivals}.items():
            is_ours = name == OURS
            colour = _OURS_COLOUR if is_ours else colours[name]
            axes.barh(position, each.median - start, left=start, height=0.82, color=colour)
            axes.plot([each.low, each.high], [position, position], color=_INK, alpha=0.35, linewidth=1.2)
            _draw_samples(axes, each, position)
            label = quantity(each.median, row.unit) + ("" if is_ours else f"   {ratio(row, name)}")
            end = max(each.median, each.high, *each.samples)
            axes.annotate(
                label, (end, position), xytext=(5, 0), textcoords="offset points",
                va="center", fontsize=8.5, color=_OURS_COLOUR if is_ours else _INK,
                fontweight="bold" if is_ours else "normal", annotation_clip=False,
            )  # fmt: skip
            position += 1
        ticks.append((first + position - 1) / 2)
        position += 0.7
    axes.set_yticks(ticks, [textwrap.fill(row.name, 34) for row in rows])
    axes.set_ylim(position - 0.7, -0.7)
    _value_axis(axes.xaxis, rows[0].unit, axes.get_xlim(), is_log=is_log)


def _draw_samples(axes: Axes, each: Measurement, position: float) -> None:
    """The distribution: a dot for every sample, spread over the bar's height so equal ones can be told apart."""
    heights = [position - 0.3 + 0.6 * (number * 0.618 % 1) for number in range(len(each.samples))]
    axes.scatter(each.samples, heights, s=5, color=_INK, alpha=0.35, linewidths=0, zorder=3)


def _draw_curves(axes: Axes, rows: list[Row], colours: dict[str, str]) -> None:
    """A line per contestant over the rows' x, with the spread as a band."""
    ordered = sorted(rows, key=lambda row: row.x or 0.0)
    curves: dict[str, list[tuple[float, Measurement]]] = {}
    for row in ordered:
        for name, each in {**row.rivals, OURS: row.ours}.items():
            curves.setdefault(name, []).append((row.x or 0.0, each))
    medians = [each.median for points in curves.values() for _, each in points]
    positions = [row.x or 0.0 for row in ordered]
    if min(positions) > 0 and max(positions) / min(positions) > 16:
        axes.set_xscale("log", base=2)
    else:
        axes.set_xticks(positions)
    is_log = max(medians) / min(medians) > _LOG_SPREAD
    if is_log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, max(medians) * 1.08)
    for name, points in curves.items():
        colour = colours.get(name, _OURS_COLOUR)
        places, found = [x for x, _ in points], [measured for _, measured in points]
        lows, highs = [each.low for each in found], [each.high for each in found]
        axes.fill_between(places, lows, highs, color=colour, alpha=0.18, linewidth=0)
        axes.plot(
            places, [each.median for each in found], color=colour, marker="o", markersize=4.5,
            linewidth=2.4 if name == OURS else 1.6,
        )  # fmt: skip
        axes.annotate(
            quantity(found[-1].median, rows[0].unit), (places[-1], found[-1].median), xytext=(8, 0),
            textcoords="offset points", va="center", fontsize=8.5, color=colour, annotation_clip=False,
        )  # fmt: skip
    axes.grid(axis="x", color="#eceff3")
    _value_axis(axes.yaxis, rows[0].unit, axes.get_ylim(), is_log=is_log)


def _value_axis(axis: Any, unit: Unit, limits: tuple[float, float], *, is_log: bool) -> None:
    """Ticks formatted like the labels; on a log axis one per decade, few enough to read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if is_log:
        decades = math.log10(limits[1] / limits[0])
        axis.set_major_locator(LogLocator(base=10 ** max(1, round(decades / 6))))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, unit)))
    axis.set_tick_params(labelcolor=_FAINT, which="both", length=0)
    axis.grid(visible=True, color="#eceff3", which="major")
