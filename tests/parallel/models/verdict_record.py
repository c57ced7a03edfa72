"""What became of every cell of the matrix of models, kept in a file between runs: the table of the guide is made of it.

The whole matrix takes half an hour, so it is run in pieces. The cells of one library's models are of one version of the
source: a run on another one starts its library's record again.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.bed.world import ROOT
from tests.parallel.models.zoo import SPECIMENS

RECORD = Path(__file__).with_name("verdicts.json")

Found = Mapping[int, Mapping[tuple[str, str], str]]
"""Verdicts by number of ranks, model and axis."""


@dataclass
class LibraryRecord:
    """The cells of the models of one library, and what they were run with."""

    commit: str
    """The last one that changed `src`."""
    torch: str
    version: str
    """Of the library."""
    cells: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    """Model, axis and number of ranks to a verdict."""

    def ran_like(self, other: LibraryRecord) -> bool:
        """Whether both were run on the same source with the same libraries."""
        return (self.commit, self.torch, self.version) == (other.commit, other.torch, other.version)


def library_of(name: str) -> str:
    """The library that a model of the zoo is from."""
    return "torchvision" if SPECIMENS[name].is_from_torchvision else "transformers"


def read_record() -> dict[str, LibraryRecord]:
    """The record by library."""
    if not RECORD.exists():
        return {}
    return {library: LibraryRecord(**one) for library, one in json.loads(RECORD.read_text()).items()}


def keep(found: Found) -> dict[str, LibraryRecord]:
    """Add verdicts of a run on this source to the record; returns the record."""
    record = read_record()
    for library in sorted({library_of(name) for cells in found.values() for name, _ in cells}):
        here = LibraryRecord(source_commit(), importlib.metadata.version("torch"), importlib.metadata.version(library))
        if library not in record or not record[library].ran_like(here):
            record[library] = here
        for ranks, cells in found.items():
            for (name, axis), verdict in cells.items():
                if library_of(name) == library:
                    record[library].cells.setdefault(name, {}).setdefault(axis, {})[str(ranks)] = verdict
    RECORD.write_text(json.dumps({library: asdict(one) for library, one in record.items()}, indent=1) + "\n")
    return record


def found_in(record: Mapping[str, LibraryRecord]) -> dict[int, dict[tuple[str, str], str]]:
    """The record in the form in which a run gives it."""
    found: dict[int, dict[tuple[str, str], str]] = {}
    for one in record.values():
        for name, axes in one.cells.items():
            for axis, verdicts in axes.items():
                for ranks, verdict in verdicts.items():
                    found.setdefault(int(ranks), {})[name, axis] = verdict
    return found


def source_commit() -> str:
    """The last commit that changed `src`; a source that is not committed cannot be named, so it is refused."""
    if _git("status", "--porcelain", "--", "src"):
        raise SystemExit("src has changes that are not committed: a record has to name the source that was run")
    return _git("log", "-1", "--format=%h", "--", "src")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def origin(record: Mapping[str, LibraryRecord]) -> str:
    """What was run with what, in words for the page."""
    return " ".join(
        f"Models of {library} were run with {library} {one.version} and torch {one.torch}, at commit {one.commit}."
        for library, one in record.items()
    )
