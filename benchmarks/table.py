"""A result on the terminal."""

from __future__ import annotations

from rich.table import Table

from benchmarks.harness import OURS
from benchmarks.result import Result
from benchmarks.wording import quantity, ratio


def table_of(result: Result) -> Table:
    """One line per row: our number, then each rival's with the ratio (above 1×: ours is better)."""
    machine = result.machine
    caption = [f"{machine.cpu}, {machine.num_cores} cores, torch {machine.torch}, load before {machine.load_before}"]
    caption += result.notes
    if result.budget == "quick":
        caption.append("a quick run: it shows that the case works; do not quote the numbers")
    table = Table(title=result.title, caption="\n".join(caption), title_justify="left", caption_justify="left")
    table.add_column(result.case)
    table.add_column(OURS, justify="right", style="bold")
    for rival in result.rivals:
        table.add_column(rival, justify="right")
        table.add_column("ratio", justify="right")
    for row in result.rows:
        cells = [row.name, quantity(row.ours.median, row.unit)]
        for rival in result.rivals:
            theirs = row.rivals.get(rival)
            cells.append("" if theirs is None else quantity(theirs.median, row.unit))
            factor = row.ratios.get(rival, 1.0)
            cells.append(f"[{'green' if factor >= 1 else 'red'}]{ratio(row, rival)}[/]")
        table.add_row(*cells)
    return table
