"""`report`: from a training function to whoever started it, through the engine's process.

Under Ray Tune a report lets the scheduler end a trial early; from `run_training` it reaches `on_report`. Anywhere else
it does nothing, so that the same function runs under `torsh run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torsh_distributed import known_variables

RESUME_VARIABLE = "TORSH_RESUME_FROM"
ReportSink = Callable[[Mapping[str, Any], str | None], None]

_sink: ReportSink | None = None


def report(metrics: Mapping[str, Any], *, checkpoint: str | os.PathLike[str] | None = None) -> None:
    """Report numbers of this moment, such as a loss; every rank may call this, and rank 0's report counts.

    `checkpoint`: a directory with the state to go on from, if the trial is moved or copied.
    """
    if _sink is not None and known_variables.whole_number("RANK") == 0:
        _sink(dict(metrics), None if checkpoint is None else os.fspath(checkpoint))


def resume_directory() -> str | None:
    """The directory of the checkpoint that this trial goes on from; None if it starts from scratch."""
    return os.environ.get(RESUME_VARIABLE) or None


@contextmanager
def reporting_to(sink: ReportSink | None) -> Iterator[None]:
    """Send reports of this process to `sink` for the length of a `with` block."""
    global _sink
    before, _sink = _sink, sink
    try:
        yield
    finally:
        _sink = before
