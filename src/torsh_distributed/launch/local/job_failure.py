"""Why an attempt failed: the record that a node makes and every report is written from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import MaxLen

Text = Annotated[str, MaxLen(4_000)]
"""A text that travels between launchers."""


@dataclass(frozen=True, kw_only=True)
class JobFailure:
    """Why an attempt failed: a worker that failed, or a node that was lost (then `rank` is None)."""

    node_rank: int
    node_name: Text
    rank: int | None = None
    pid: int | None = None
    exit_code: int = 1
    """For the shell: the worker's, or 128 + signal; never 0."""
    cause: Text
    evidence: Text | None = None
    """What proves the cause beyond the exit status, such as the kernel's count of out-of-memory kills."""
    ran_s: float | None = None
    step: int | None = None
    checkpoint_step: int | None = None
    last_lines: tuple[Text, ...] = ()
    """The end of the worker's stderr."""
    log: Text | None = None
    finished_before: tuple[tuple[int, float], ...] = ()
    """(rank, seconds before the failure) of workers on that node that had succeeded while others went on."""
