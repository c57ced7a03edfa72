"""Where a process's events go when the environment asks for it: TORSH_EVENTS_DIR and TORSH_PROGRESS_FILE."""

from __future__ import annotations

import os

from torsh_distributed.events import JsonlSink
from torsh_distributed.launch.progress import ProgressWriter

# By process: a forked child records for itself, into files of its own.
_recorders: dict[int, list[JsonlSink | ProgressWriter]] = {}


def record_events() -> None:
    """Start the sinks that the environment names, once per process; they close at interpreter exit."""
    if os.getpid() in _recorders:
        return
    started: list[JsonlSink | ProgressWriter] = []
    directory = os.environ.get("TORSH_EVENTS_DIR")
    if directory:
        started.append(JsonlSink(directory))
    progress = os.environ.get("TORSH_PROGRESS_FILE")
    if progress:
        started.append(ProgressWriter(progress))
    _recorders.clear()
    _recorders[os.getpid()] = started
