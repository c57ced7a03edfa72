"""Numbers as people read them, the same in table, page and plot."""

from __future__ import annotations

from benchmarks.harness import Unit
from torsh_distributed.cli.bench.rivals.rows_table import quantity, ratio, scaled

__all__ = ["quantity", "ratio", "tick"]


def tick(value: float, unit: Unit) -> str:
    """A quantity on an axis, where values are round: `10 µs`."""
    if unit is Unit.ERROR:
        return f"{value:.0%}"
    if value == 0 or unit in (Unit.LOSS, Unit.COUNT):
        return f"{value:g}"
    number, name = scaled(value, unit)
    return f"{number:g} {name}"
