"""What ranks without a launcher wrote down about their failures, read as one: which failed first, and why."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torsh_distributed.clusters.base import JobState, JobStatus
from torsh_distributed.clusters.ranks import rank_start
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import IoError
from torsh_distributed.launch.entry import command_line
from torsh_distributed.launch.spec import EntryKind
from torsh_distributed.unreadable_data import unreadable_as

_MAX_TRACEBACK_LINES = 12


def rank_command(submission: Submission, *, python: str = sys.executable) -> list[str]:
    """The command line of every rank."""
    entry = submission.entry
    if entry.kind is EntryKind.COMMAND:
        return command_line(entry)
    module = ["-m"] if entry.kind is EntryKind.MODULE else []
    return [python, str(Path(rank_start.__file__)), *module, entry.target, *entry.args]


def report_directory(folder: Path) -> Path:
    """Where the ranks of a job leave their reports, empty."""
    path = folder / "reports"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    return path


def job_variables(submission: Submission, *, reports: Path, secret_file: Path | None) -> dict[str, str]:
    """The job's own variables for ranks that our launcher does not start."""
    found = {rank_start.REPORT_VARIABLE: str(reports)}
    if secret_file is not None:
        found["TORSH_SECRET_FILE"] = str(secret_file)
    if submission.plan is not None:
        found["TORSH_PLAN"] = str(submission.plan)
    if submission.cpus_per_worker > 1:
        found["OMP_NUM_THREADS"] = str(submission.cpus_per_worker)
    elif submission.workers_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = "1"  # as `torsh run` does
    return {**found, **submission.env}


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """Which rank ended a job, in words, and the exit code that it had."""

    text: str
    exit_code: int


def first_failure(reports: Path) -> FirstFailure | None:
    """The cause of a job's end from the reports; None if no rank left one.

    A rank that only says that another one is gone is not the cause, however early it noticed.
    """
    with unreadable_as(IoError, "what the ranks wrote about their failures cannot be read", path=str(reports)):
        return _first_of([_read(path) for path in reports.glob("rank-*.json")] if reports.is_dir() else [])


def _first_of(found: list[Mapping[str, Any]]) -> FirstFailure | None:
    if not found:
        return None
    first = min(found, key=lambda one: (bool(one.get("is_consequence")), float(one.get("at_s", 0.0))))
    said = str(first.get("message", "")).strip().partition("\n")[0]
    where = f" at {first['where']}" if first.get("where") else ""
    lines = [f"rank {first['rank']} on {first['host']} failed first: {first.get('kind')}: {said}{where}"]
    lines += [f"    {line}" for line in first.get("traceback", [])[-_MAX_TRACEBACK_LINES:]]
    others = sorted(int(one["rank"]) for one in found if one is not first)
    if others:
        lines.append(f"  then rank {', '.join(map(str, others))}")
    return FirstFailure("\n".join(lines), int(first.get("exit_code", 1)))


def with_cause(status: JobStatus, reports: Path) -> JobStatus:
    """The status of a job that failed, with the cause that its ranks wrote down, if they did."""
    cause = first_failure(reports) if status.state is JobState.FAILED else None
    if cause is None:
        return status
    # The engine reports the highest code of all ranks: those that it ended hide the one that failed.
    detail = f"{status.detail}; {cause.text}" if status.detail else cause.text
    return replace(status, detail=detail, exit_code=cause.exit_code)


def _read(path: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(path.read_bytes())
    return found
