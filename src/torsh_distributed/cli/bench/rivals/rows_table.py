"""Rows as people read them: quantities with three digits, ratios, a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from torsh_distributed.cli.bench.rivals.side_by_side import OURS, Row, RowUnit

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_LARGE = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_MOST_ABREAST = 2


def quantity(value: float, unit: RowUnit) -> str:
    """Three significant digits with a suitable prefix: 0.0000042 s is `4.20 µs`."""
    if unit is RowUnit.LOSS:
        return f"{value:.4f}"
    if unit is RowUnit.ERROR:
        return f"{value:.1%}"
    if unit is RowUnit.COUNT:
        return f"{value:,.6g}"
    if unit in (RowUnit.JOULES, RowUnit.GRAMS):
        return f"{value:,.6g} {unit}"
    number, name = scaled(value, unit)
    return f"{_digits(number)} {name}"


def scaled(value: float, unit: RowUnit) -> tuple[float, str]:
    """The number before a suitable prefix, and the unit with it."""
    if unit in (RowUnit.JOULES, RowUnit.GRAMS):
        return value, unit.value
    scales = _TIMES if unit is RowUnit.SECONDS else _LARGE
    scale, prefix = next((each for each in scales if value >= 0.9995 * each[0]), scales[-1])
    suffix = {RowUnit.SECONDS: "", RowUnit.BYTES: "B", RowUnit.BYTES_PER_SECOND: "B/s", RowUnit.PER_SECOND: "/s"}[unit]
    return value / scale, f"{prefix}{suffix}"


def _digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(row: Row, rival: str) -> str:
    """`3.4×`, or nothing if there is no such rival."""
    factor = row.ratios.get(rival)
    if factor is not None and row.unit in (RowUnit.LOSS, RowUnit.JOULES, RowUnit.GRAMS):
        return f"{factor:.4f}×" if row.unit is RowUnit.JOULES else f"{factor:.3f}×"
    return "" if factor is None else f"{_digits(factor)}×"


def rivals_of(rows: Sequence[Row]) -> list[str]:
    """All rivals, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.rivals))


def table_of_rows(rows: Sequence[Row], *, title: str, header: str, caption: str) -> Table:
    """Our number of each row, and each rival's with the ratio (above 1×: ours is better): side by side, or stacked if
    there are too many for a terminal."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    fill = _fill_abreast if len(rivals_of(rows)) <= _MOST_ABREAST else _fill_below
    fill(table, rows, header)
    return table


def _fill_abreast(table: Table, rows: Sequence[Row], header: str) -> None:
    rivals = rivals_of(rows)
    table.add_column(header)
    table.add_column(OURS, justify="right", style="bold")
    for rival in rivals:
        table.add_column(rival, justify="right")
        table.add_column("ratio", justify="right")
    for row in rows:
        cells = [cell for rival in rivals for cell in _cells(row, rival)]
        table.add_row(row.name, quantity(row.ours.median, row.unit), *cells)


def _fill_below(table: Table, rows: Sequence[Row], header: str) -> None:
    for column in (header, OURS):
        table.add_column(column, style="bold" if column == OURS else None)
    for column in ("rival", "", "ratio"):
        table.add_column(column, justify="left" if column == "rival" else "right")
    for row in rows:
        lead = (row.name, quantity(row.ours.median, row.unit))
        if not row.rivals:
            table.add_row(*lead)
        for rival in row.rivals:
            table.add_row(*lead, rival, *_cells(row, rival))
            lead = ("", "")
        table.add_section()


def _cells(row: Row, rival: str) -> tuple[str, str]:
    """The rival's number, and the ratio."""
    theirs = row.rivals.get(rival)
    factor = row.ratios.get(rival, 1.0)
    return (
        "" if theirs is None else quantity(theirs.median, row.unit),
        f"[{'green' if factor >= 1 else 'red'}]{ratio(row, rival)}[/]",
    )
