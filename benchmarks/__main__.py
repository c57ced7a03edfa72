"""`python -m benchmarks [case …] [--json DIR] [--quick]`."""

from __future__ import annotations

import difflib
import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.cases import case_names, load_case
from benchmarks.harness import FULL, QUICK
from benchmarks.page import write_page
from benchmarks.plot import save_plot
from benchmarks.result import RESULTS, run_case, save_result
from benchmarks.table import table_of


def main(
    cases: Annotated[list[str] | None, typer.Argument(help="Cases to run; all by default.")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Folder for results and plots. Default: benchmarks/results; none with --quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only check that the cases work.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Only rewrite docs/benchmarks.md and the plots.")] = False,
) -> None:
    """Measure our code and its rivals side by side."""
    # What cases start keeps what it compiles: else every process compiles the library again, and that is measured.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    console = Console()
    if page:
        write_page(redraw=True)
        return
    names = cases or case_names()
    for name in names:
        if name not in case_names():
            nearest = difflib.get_close_matches(name, case_names(), n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are: {', '.join(case_names())}"
            raise typer.BadParameter(f"no case is called {name!r}; {hint}")
    folder = json if json is not None else None if quick else RESULTS
    for name in names:
        start = time.monotonic()
        result = run_case(name, load_case(name), QUICK if quick else FULL)
        console.print(table_of(result))
        if not result.rows:
            # Keep what a machine that could measure it has found.
            console.print(f"{name}: nothing was measured, nothing is kept")
            continue
        if folder is not None:
            save_result(result, folder)
            save_plot(result, folder)
        console.print(f"{name}: {time.monotonic() - start:.1f} s" + (f", kept in {folder}" if folder else ""))
    if folder == RESULTS:
        write_page()


if __name__ == "__main__":
    typer.run(main)
