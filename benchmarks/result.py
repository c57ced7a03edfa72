"""Results of running a case, as JSON kept beside the code."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Budget, Case, Note, Row
from benchmarks.machine import ROOT, Machine, describe_machine
from torsh_distributed.cli.bench.rivals.side_by_side import row_from

RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The rows of a case, with everything needed to read them a year later."""

    case: str
    title: str
    about: str
    x_label: str
    budget: str
    machine: Machine
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def rivals(self) -> list[str]:
        """All rivals, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row.rivals))


def run_case(name: str, case: Case, budget: Budget) -> Result:
    """Measure a whole case."""
    machine = describe_machine()
    found = list(case.rows(budget))
    return Result(
        case=name,
        title=case.title,
        about=" ".join(case.about.split()),
        x_label=case.x_label,
        budget=budget.name,
        machine=machine,
        rows=tuple(row for row in found if isinstance(row, Row)),
        notes=tuple(note.text for note in found if isinstance(note, Note)),
    )


def beside_earlier(result: Result, folder: Path, parts: Sequence[str]) -> Result:
    """A result of some parts of its case, with the other parts as they were measured earlier on the same machine."""
    path = folder / f"{result.case}.json"
    earlier = load_result(path) if path.exists() else None
    if earlier is None or earlier.budget != result.budget or not earlier.machine.is_like(result.machine):
        return result
    names = {row.name for row in result.rows}
    kept = [text for text in earlier.notes if text not in result.notes and not text.startswith(tuple(parts))]
    return replace(
        result,
        rows=(*(row for row in earlier.rows if row.name not in names), *result.rows),
        notes=(*kept, *result.notes),
    )


def record_of(result: Result) -> dict[str, Any]:
    """The result as it is written; samples only where they are kept."""
    record = asdict(result)
    for row in record["rows"]:
        for measured in (row["ours"], *row["rivals"].values()):
            if not measured["samples"]:
                del measured["samples"]
    return record


def save_result(result: Result, folder: Path) -> Path:
    """Write `<case>.json` atomically; ratios are in it for readers, and recomputed on loading."""
    record = record_of(result)
    for row, written in zip(result.rows, record["rows"], strict=True):
        written["ratios"] = {name: round(ratio, 3) for name, ratio in row.ratios.items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.case}.json"
    unfinished = path.with_suffix(f".tmp-{os.getpid()}")
    unfinished.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    unfinished.replace(path)
    return path


def load_result(path: Path) -> Result:
    """Read what `save_result` wrote."""
    record = json.loads(path.read_text())
    rows = tuple(row_from(written) for written in record.pop("rows"))
    machine = Machine(**record.pop("machine"))
    notes = tuple(record.pop("notes"))
    return Result(**record, rows=rows, machine=machine, notes=notes)


def load_results(folder: Path = RESULTS) -> list[Result]:
    """All results of a folder, by name of the case."""
    return [load_result(path) for path in sorted(folder.glob("*.json"))]
