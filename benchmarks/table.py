"""A result on the terminal."""

from __future__ import annotations

from rich.table import Table

from benchmarks.harness import OURS, Row
from benchmarks.result import Result
from benchmarks.wording import quantity, ratio

_MOST_ABREAST = 3


def table_of(result: Result) -> Table:
    """Our number of each row, and each rival's with the ratio (above 1×: ours is better): side by side, or stacked if
    there are too many for a terminal."""
    machine = result.machine
    caption = [f"{machine.cpu}, {machine.num_cores} cores, torch {machine.torch}, load before {machine.load_before}"]
    caption += result.notes
    if result.budget == "quick":
        caption.append("a quick run: it shows that the case works; do not quote the numbers")
    table = Table(title=result.title, caption="\n".join(caption), title_justify="left", caption_justify="left")
    fill = _fill_abreast if len(result.rivals) <= _MOST_ABREAST else _fill_below
    fill(table, result)
    return table


def _fill_abreast(table: Table, result: Result) -> None:
    table.add_column(result.case)
    table.add_column(OURS, justify="right", style="bold")
    for rival in result.rivals:
        table.add_column(rival, justify="right")
        table.add_column("ratio", justify="right")
    for row in result.rows:
        rivals = [cell for rival in result.rivals for cell in _cells(row, rival)]
        table.add_row(row.name, quantity(row.ours.median, row.unit), *rivals)


def _fill_below(table: Table, result: Result) -> None:
    for header in (result.case, OURS):
        table.add_column(header, style="bold" if header == OURS else None)
    for header in ("rival", "", "ratio"):
        table.add_column(header, justify="left" if header == "rival" else "right")
    for row in result.rows:
        lead = (row.name, quantity(row.ours.median, row.unit))
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
