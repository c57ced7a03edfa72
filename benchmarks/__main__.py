"""`python -m benchmarks [case …] [--only PART] [--json DIR] [--quick] [--against FILE|COMMIT]`."""

from __future__ import annotations

import difflib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.cases import case_names, load_case
from benchmarks.earlier_commit import pairs_of, tree_of
from benchmarks.harness import FULL, QUICK, Budget, Case
from benchmarks.machine import ROOT
from benchmarks.page import write_page
from benchmarks.plot import save_plot
from benchmarks.regression import COMMIT_TOLERANCE, TOLERANCE, Change, lasting
from benchmarks.result import RESULTS, beside_earlier, load_result, load_results, run_case, save_result
from benchmarks.table import table_of


def main(
    cases: Annotated[list[str] | None, typer.Argument(help="Cases to run; all by default.")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Folder for results and plots. Default: benchmarks/results; none with --quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only check that the cases work.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Parts of one long case, by name or its beginning; the others stay as they were measured."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="An earlier result, a folder of them, or a commit: status 1 if something is worse. Nothing is kept."
        ),
    ] = None,
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
    if against is not None:
        _hold_against(against, cases, QUICK if quick else FULL, console)
        return
    folder = json if json is not None else None if quick else RESULTS
    for name in names:
        start = time.monotonic()
        case = load_case(name)
        parts = tuple(part_named(case, name, wanted) for wanted in only or ())
        result = run_case(name, case, replace(QUICK if quick else FULL, parts=parts))
        if parts and folder is not None:
            result = beside_earlier(result, folder, parts)
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


def _hold_against(what: str, cases: list[str] | None, budget: Budget, console: Console) -> None:
    """Measure again and print what changed; status 1 if something is worse for certain."""
    if not Path(what).exists():
        changes, tolerance = _since_commit(what, cases), COMMIT_TOLERANCE
    else:
        changes, tolerance = _since_results(Path(what), cases, budget), TOLERANCE
    num_worse, num_compared = 0, 0
    for change in changes:
        num_compared += 1
        verdict = "worse" if change.is_worse(tolerance) else "better" if change.is_better(tolerance) else "noise"
        num_worse += verdict == "worse"
        console.print(
            f"{verdict:6} {change.case}: {change.row} against {change.against}: x {change.factor:.2f}"
            f" ({change.low:.2f} to {change.high:.2f})",
            highlight=False,
            markup=False,
        )
    if num_compared == 0:
        console.print(
            f"nothing here can be compared with {what}: rows without a rival need the same machine, counts the same"
            " version of torch; if that is newer now, measure and keep the case again",
            highlight=False,
            markup=False,
        )
    if num_worse or num_compared == 0:
        raise typer.Exit(1)


def _since_results(path: Path, cases: list[str] | None, budget: Budget) -> Iterator[Change]:
    """The changes since kept results, case by case."""
    earlier = load_results(path) if path.is_dir() else [load_result(path)]
    chosen = [one for one in earlier if cases is None or one.case in cases]
    if not chosen:
        raise typer.BadParameter(f"{path} has no result of these cases")
    for one in chosen:
        yield from lasting(
            lambda names, one=one: [(run_case(name, load_case(name), budget), one) for name in names],  # type: ignore[misc]
            [one.case],
        )


def _since_commit(commit: str, cases: list[str] | None) -> Iterator[Change]:
    """The changes of quick runs since a commit, which is measured here too, in turns."""
    if not cases:
        raise typer.BadParameter("against a commit the cases are named: those that are quick and have rivals")
    known = subprocess.run(["git", "rev-parse", "--verify", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True)
    if known.returncode:
        raise typer.BadParameter(f"{commit} is neither a file nor a commit of this repository")
    with tree_of(commit) as tree:
        yield from lasting(partial(pairs_of, tree), cases, tolerance=COMMIT_TOLERANCE, needs_rival=True)


def part_named(case: Case, name: str, wanted: str) -> str:
    """The part of a case that is called so, or the only one whose name begins so."""
    found = [part for part in case.parts if part == wanted] or [
        part for part in case.parts if part.casefold().startswith(wanted.casefold())
    ]
    if len(found) != 1:
        known = ", ".join(case.parts) or "none"
        raise typer.BadParameter(f"{wanted!r} names no one part of the case {name}; there are: {known}")
    return found[0]


if __name__ == "__main__":
    typer.run(main)
