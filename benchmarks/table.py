"""A result on the terminal."""

from __future__ import annotations

from rich.table import Table

from benchmarks.result import Result
from torsh_distributed.cli.bench.rivals.rows_table import table_of_rows


def table_of(result: Result) -> Table:
    """The rows, with the machine and the notes below them."""
    machine = result.machine
    caption = [f"{machine.cpu}, {machine.num_cores} cores, torch {machine.torch}, load before {machine.load_before}"]
    caption += result.notes
    if result.budget == "quick":
        caption.append("a quick run: it shows that the case works; do not quote the numbers")
    return table_of_rows(result.rows, title=result.title, header=result.case, caption="\n".join(caption))
