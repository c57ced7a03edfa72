"""Numbers as people read them, the same in table, page and plot."""

from __future__ import annotations

from benchmarks.harness import Row, Unit

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_LARGE = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def quantity(value: float, unit: Unit) -> str:
    """Three significant digits with a suitable prefix: 0.0000042 s is `4.20 µs`."""
    if unit is Unit.LOSS:
        return f"{value:.4f}"
    if unit is Unit.ERROR:
        return f"{value:.1%}"
    if unit in (Unit.JOULES, Unit.GRAMS):
        return f"{value:,.6g} {unit}"
    number, name = _scaled(value, unit)
    return f"{_digits(number)} {name}"


def tick(value: float, unit: Unit) -> str:
    """The same on an axis, where values are round: `10 µs`."""
    if unit is Unit.ERROR:
        return f"{value:.0%}"
    if value == 0 or unit is Unit.LOSS:
        return f"{value:g}"
    number, name = _scaled(value, unit)
    return f"{number:g} {name}"


def _scaled(value: float, unit: Unit) -> tuple[float, str]:
    if unit in (Unit.JOULES, Unit.GRAMS):
        return value, unit.value
    scales = _TIMES if unit is Unit.SECONDS else _LARGE
    scale, prefix = next((each for each in scales if value >= 0.9995 * each[0]), scales[-1])
    suffix = {Unit.SECONDS: "", Unit.BYTES: "B", Unit.BYTES_PER_SECOND: "B/s", Unit.PER_SECOND: "/s"}[unit]
    return value / scale, f"{prefix}{suffix}"


def _digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(row: Row, rival: str) -> str:
    """`3.4×`, or nothing if there is no such rival."""
    factor = row.ratios.get(rival)
    if factor is not None and row.unit in (Unit.LOSS, Unit.JOULES, Unit.GRAMS):
        return f"{factor:.4f}×" if row.unit is Unit.JOULES else f"{factor:.3f}×"
    return "" if factor is None else f"{_digits(factor)}×"
