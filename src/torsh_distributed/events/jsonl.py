"""The JSON-lines sink: every process appends its events to `dir/rank-<R>.jsonl`, which this user alone can read.

Lines are buffered and written with one append at least every second and at exit; after SIGKILL the file is complete up
to the last flush and has no partial line. With a limit, a file that has reached half of it is set aside as
`rank-<R>.older.jsonl`, in place of the one before: the latest events are kept.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any, Self

from torsh_distributed.errors import IoError
from torsh_distributed.events.bus import subscribe
from torsh_distributed.events.types import Event, IncidentEvent, current_rank
from torsh_distributed.private_files import open_private

_log = logging.getLogger(__name__)
_MAX_PENDING_LINES = 10_000
INCIDENTS = "incidents.jsonl"
"""Incidents of all ranks, one file beside theirs."""


def to_record(event: Event) -> dict[str, Any]:
    """The event as plain JSON values: `time`, `rank`, `type`, then its own fields."""
    # Not dataclasses.asdict: its deep copies took most of the sink's time.
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    return {"time": fields.pop("time"), "rank": fields.pop("rank"), "type": event.kind, **fields}


class JsonlSink:
    """Appends events to one file per rank, buffered, flushed every `interval_s` and at exit.

    Each flush uses the rank known then, so events from before the rank was set go to the same file. A process without
    a rank, such as a launcher, writes `launcher-<pid>.jsonl`. Memory is bounded: at 10,000 pending lines the emitting
    thread writes them itself.
    """

    def __init__(self, directory: str | Path, *, interval_s: float = 1.0, limit_bytes: int | None = None) -> None:
        self._directory = Path(directory)
        self._limit_bytes = limit_bytes
        self._interval_s = interval_s
        self._pending: list[str] = []
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._failed = False
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe = os.open(self._directory, os.O_RDONLY)
            os.close(probe)
            if not os.access(self._directory, os.W_OK):
                raise PermissionError(f"{self._directory} is not writable")
        except OSError as error:
            raise IoError(
                "the events directory cannot be used",
                hint="set TORSH_EVENTS_DIR to a directory that this user can write",
                directory=str(self._directory),
                reason=str(error),
            ) from error
        self._unsubscribe = subscribe(self._take)
        # Started in the process that emits first, so a fork before the first event is harmless.
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        atexit.register(self.close)

    @property
    def path(self) -> Path:
        """The file that this process's events go to now."""
        rank = current_rank()
        return self._directory / (f"rank-{rank}.jsonl" if rank >= 0 else f"launcher-{os.getpid()}.jsonl")

    def _take(self, event: Event) -> None:
        line = json.dumps(to_record(event), default=str)
        if isinstance(event, IncidentEvent):
            # At once: the process may not live until the next flush.
            self._append(self._directory / INCIDENTS, line + "\n")
        with self._lock:
            if self._closed:
                return
            if self._thread is None or self._pid != os.getpid():
                self._start()
            self._pending.append(line)
            full = len(self._pending) >= _MAX_PENDING_LINES
        if full:
            self.flush()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torsh-events", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._wake.wait(self._interval_s):
            self.flush()

    def flush(self) -> None:
        """Write pending lines with one append."""
        with self._write_lock:
            with self._lock:
                lines, self._pending = self._pending, []
            if not lines:
                return
            self._append(self.path, "\n".join(lines) + "\n")

    def _append(self, path: Path, text: str) -> None:
        data = text.encode()
        try:
            fd = open_private(path, os.O_WRONLY | os.O_APPEND)
            try:
                if self._limit_bytes is not None and os.fstat(fd).st_size > self._limit_bytes // 2:
                    os.close(fd)
                    path.replace(path.with_suffix(".older.jsonl"))
                    fd = open_private(path, os.O_WRONLY | os.O_APPEND)
                while data:
                    data = data[os.write(fd, data) :]
            finally:
                os.close(fd)
        except OSError as error:
            if not self._failed:
                self._failed = True
                _log.warning("events are being lost: %s cannot be written: %s", path, error)

    def close(self) -> None:
        """Flush and stop; also called at interpreter exit. Closing again does nothing."""
        self._unsubscribe()
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and self._pid == os.getpid():
            thread.join(timeout=5)
        self.flush()
        with self._lock:
            self._closed = True
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
