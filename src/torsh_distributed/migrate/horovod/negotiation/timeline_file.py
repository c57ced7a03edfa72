"""The timeline file: when operations waited for other ranks and when they ran, as a trace that browsers draw.

Written by the first rank, line by line. Each operation is a row, named as the operation; `NEGOTIATE_ALLREDUCE` lasts
from the call until all ranks have asked, `ALLREDUCE` until the result is there. Open it in chrome://tracing or
Perfetto.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import IO, Any

from torsh_distributed.errors import IoError

_log = logging.getLogger(__name__)


class TimelineFile:
    """An open timeline. Any thread may write; a disk that is full ends the timeline, not the training."""

    def __init__(self, path: str | Path, *, mark_cycles: bool = False) -> None:
        self._path = Path(path)
        self.mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._is_first = True
        self._start_s = time.monotonic()
        try:
            self._file: IO[str] | None = self._path.open("w", buffering=1)
            self._file.write("[\n")
        except OSError as error:
            raise IoError(
                "the timeline file cannot be written",
                hint="give --timeline-filename (HOROVOD_TIMELINE) a path in a directory that exists",
                path=str(path),
                reason=error.strerror or str(error),
            ) from error

    def note(self, name: str, phase: str, start_s: float, end_s: float, **facts: Any) -> None:
        """A span of one operation, in seconds of the monotonic clock."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows) + 1
            self._write({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})
        self._write(
            {
                "name": phase,
                "ph": "X",
                "pid": row,
                "tid": 0,
                "ts": round((start_s - self._start_s) * 1e6, 3),
                "dur": round((end_s - start_s) * 1e6, 3),
                "args": {"name": name, **facts},
            }
        )

    def note_cycle(self) -> None:
        """The engine begins to work on what has arrived."""
        if self.mark_cycles:
            moment = round((time.monotonic() - self._start_s) * 1e6, 3)
            self._write({"name": "CYCLE_START", "ph": "i", "pid": 0, "tid": 0, "ts": moment, "s": "g"})

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self._file is None:
                return
            text = json.dumps(event)
            try:
                self._file.write(text if self._is_first else ",\n" + text)
            except OSError as error:
                _log.warning("the timeline %s ends here: %s", self._path, error)
                self._file = None
            self._is_first = False

    def close(self) -> None:
        """End the file; it is valid JSON then."""
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None
