"""Record a process's events where TORSH_EVENTS_DIR and TORSH_PROGRESS_FILE say."""

from __future__ import annotations

import os
from pathlib import Path

from torsh_distributed.events import JsonlSink
from torsh_distributed.launch.worker.launcher_line import note_error_in_flight
from torsh_distributed.launch.worker.memory_samples import MemorySamples
from torsh_distributed.launch.worker.progress import ProgressWriter

# By process: a forked child records into its own files.
_recorders: dict[int, list[JsonlSink | MemorySamples | ProgressWriter]] = {}


def record_events(directory: str | Path | None = None) -> None:
    """Start the sinks that the environment or the plan names, once per process; they close at interpreter exit.

    TORSH_EVENTS_DIR wins over `directory`, as the environment wins over a file everywhere.
    """
    if os.getpid() in _recorders:
        return
    started: list[JsonlSink | MemorySamples | ProgressWriter] = []
    chosen = os.environ.get("TORSH_EVENTS_DIR") or directory
    if chosen:
        started += [JsonlSink(chosen), MemorySamples()]
    progress = os.environ.get("TORSH_PROGRESS_FILE")
    if progress:
        started.append(ProgressWriter(progress, on_leaving=note_error_in_flight))
    _recorders.clear()
    _recorders[os.getpid()] = started
