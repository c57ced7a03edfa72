"""Record a process's events where TORSH_EVENTS_DIR and TORSH_PROGRESS_FILE say."""

from __future__ import annotations

import os
from pathlib import Path

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.events import JsonlSink
from torsh_distributed.launch.worker.launcher_line import note_error_in_flight
from torsh_distributed.launch.worker.recording.memory_samples import MemorySamples
from torsh_distributed.launch.worker.recording.progress import ProgressWriter

LIMIT_VARIABLE = "TORSH_EVENTS_MAX_MB"
"""The most that the events of a rank take; the oldest are dropped. `torsh run --trace` sets it."""

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
        started += [JsonlSink(chosen, limit_bytes=_limit_bytes()), MemorySamples()]
    progress = os.environ.get("TORSH_PROGRESS_FILE")
    if progress:
        started.append(ProgressWriter(progress, on_leaving=note_error_in_flight))
    _recorders.clear()
    _recorders[os.getpid()] = started


def _limit_bytes() -> int | None:
    text = os.environ.get(LIMIT_VARIABLE)
    if text is None:
        return None
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 < limit < float("inf"):
        raise ConfigurationError(
            f"{LIMIT_VARIABLE} must be a number of megabytes above 0", hint="set it to 200", got=text
        )
    return int(limit * 2**20)
