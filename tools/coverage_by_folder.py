"""Measures the lines and branches of each package that its own tests reach, and compares them with tests/coverage.json.

`make coverage`, or some packages: `make coverage FOLDERS="compress plan"`. A package is measured by the tests
that mirror it, so one can be measured by itself; ranks, workers and other interpreters count too.
Processes that a test kills tell nothing. With `--turn HASH` the hash of a commit chooses one
of those whose figures are kept; `--keep` writes what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[1]
SOURCE, TESTS = ROOT / "src" / "torsh_distributed", ROOT / "tests"
KEPT = TESTS / "coverage.json"
TOP = "top"
"""The modules that are in no package, and their tests."""
TOLERANCE = 2.0
"""Percentage points: which lines run depends a little on timing, and on what else is installed."""
SETTINGS = """
[run]
branch = true
parallel = true
data_file = {data}
include = {files}
patch =
    subprocess
    _exit
disable_warnings = no-data-collected, module-not-measured, module-not-imported
"""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """How many there are, and how many of them the tests reach."""

    lines: int = 0
    lines_run: int = 0
    branches: int = 0
    branches_run: int = 0

    def __add__(self, other: Reached) -> Reached:
        return Reached(
            lines=self.lines + other.lines,
            lines_run=self.lines_run + other.lines_run,
            branches=self.branches + other.branches,
            branches_run=self.branches_run + other.branches_run,
        )

    @property
    def shares(self) -> dict[str, float]:
        """In percent; what has no branches misses none."""
        return {
            "lines": round(100 * self.lines_run / max(1, self.lines), 1),
            "branches": round(100 * self.branches_run / self.branches, 1) if self.branches else 100.0,
        }


def main() -> None:
    """Measure the packages that are named, or all; 1 if a test fails or a share has fallen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="default: all")
    parser.add_argument("--turn", metavar="HASH", help="choose one by the hash of a commit")
    parser.add_argument("--keep", action="store_true", help=f"write what was found into {KEPT.relative_to(ROOT)}")
    options, pytest_args = parser.parse_known_args()
    if unknown := set(options.folders) - set(folders()):
        parser.error(f"no package with tests: {', '.join(sorted(unknown))}; there are {', '.join(folders())}")
    kept = json.loads(KEPT.read_text())
    chosen = [folder_of(options.turn, sorted(kept))] if options.turn else options.folders or folders()
    complaints = []
    print(f"{'package':32} {'files':>5} {'lines':>7} {'branches':>9}", flush=True)
    for folder in chosen:
        found, code = measure(folder, pytest_args)
        print_table(folder, found, kept.get(folder))
        shares = total(found.values()).shares
        if code != 0:
            complaints.append(f"{folder}: its tests fail (exit code {code})")
        elif options.keep:
            kept[folder] = shares
        else:
            complaints += fallen(folder, shares, kept.get(folder))
    if options.keep:
        KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    sys.exit("\n".join(complaints) or 0)


def folders() -> list[str]:
    """The packages with tests of their own, and `top`."""
    return [
        TOP,
        *sorted(path.parent.name for path in SOURCE.glob("*/__init__.py") if (TESTS / path.parent.name).exists()),
    ]


def folder_of(commit: str, packages: list[str]) -> str:
    """The one of `packages` whose turn it is at a commit."""
    return packages[int(commit[:8], 16) % len(packages)]


def fallen(folder: str, shares: dict[str, float], kept: dict[str, float] | None) -> list[str]:
    """What to say of shares that are below those that are kept."""
    return [
        f"{folder}: {share:.1f} % of {what} are reached, {before:.1f} % before: test what was added, or say why not and"
        f" write the new figure with `make coverage FOLDERS={folder} COVERAGE_ARGS=--keep`"
        for what, before in (kept or {}).items()
        if (share := shares[what]) < before - TOLERANCE
    ]


def measure(folder: str, pytest_args: list[str]) -> tuple[dict[Path, Reached], int]:
    """Run the tests of a package: what they reach of each of its files, and pytest's exit code."""
    files = sorted(SOURCE.glob("*.py") if folder == TOP else (SOURCE / folder).rglob("*.py"))
    tests = sorted(map(str, TESTS.glob("test_*.py"))) if folder == TOP else [str(TESTS / folder)]
    with tempfile.TemporaryDirectory() as place:
        settings = Path(place) / "settings"
        pattern = SOURCE / "*.py" if folder == TOP else SOURCE / folder / "**" / "*.py"
        settings.write_text(SETTINGS.format(data=Path(place) / "data", files=pattern))
        run = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q"]
        command = [*run, "-n", "2", "--dist", "worksteal", *pytest_args, *tests]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            print(done.stdout)
        data = coverage.Coverage(config_file=str(settings))
        data.combine()
        data.save()
        return {path: reached(data, path) for path in files}, done.returncode


def reached(data: coverage.Coverage, path: Path) -> Reached:
    """What is known of one file; one that nobody imported has its lines all the same."""
    _, lines, _, missing, _ = data.analysis2(str(path))
    branches = data.branch_stats(str(path)).values()
    return Reached(
        lines=len(lines),
        lines_run=len(lines) - len(missing),
        branches=sum(number for number, _ in branches),
        branches_run=sum(taken for _, taken in branches),
    )


def total(parts: Iterable[Reached]) -> Reached:
    """Of all files together."""
    return sum(parts, Reached())


def print_table(folder: str, found: dict[Path, Reached], kept: dict[str, float] | None) -> None:
    """The package with what is kept of it, then its rooms."""
    before = "" if kept is None else f"   kept: {kept['lines']:.1f} {kept['branches']:.1f}"
    print(row(folder, found.values()) + before)
    base = SOURCE if folder == TOP else SOURCE / folder
    rooms: dict[str, list[Reached]] = {}
    for path, one in found.items():
        room, inside, _ = str(path.relative_to(base)).partition(os.sep)
        if inside:
            rooms.setdefault(room, []).append(one)
    for room, parts in rooms.items():
        print(row(f"  {folder}/{room}", parts))
    sys.stdout.flush()


def row(name: str, parts: Iterable[Reached]) -> str:
    """One line of the table."""
    known = list(parts)
    shares = total(known).shares
    return f"{name:32} {len(known):5} {shares['lines']:6.1f} % {shares['branches']:7.1f} %"


if __name__ == "__main__":
    main()
