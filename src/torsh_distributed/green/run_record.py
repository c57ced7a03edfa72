"""What a run has spent and planned, kept in a file so that a job that is started again goes on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_VERSION = 1
_MAX_BYTES = 1 << 20


class RunRecord:
    """A small JSON file in the run's directory, written whole by one process: the launcher of node 0."""

    def __init__(self, path: Path) -> None:
        """Reads what is there. Raises OSError if the directory cannot be made, ValueError if the file is damaged."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.kept: Mapping[str, Any] = {}
        """What an earlier launcher left; empty in a new run."""
        if path.exists():
            with path.open("rb") as file:
                try:
                    found = json.loads(file.read(_MAX_BYTES))
                except RecursionError as error:
                    raise ValueError("nested too deeply") from error
            if not isinstance(found, dict) or found.get("version") != _VERSION:
                raise ValueError("another version, or not a record of this library")
            self.kept = found

    def write(self, parts: Mapping[str, Any]) -> None:
        """Replace the file: who reads it sees the old or the new one, whole."""
        partial = self.path.with_suffix(".new")
        partial.write_text(json.dumps({"version": _VERSION, **parts}))
        partial.replace(self.path)

    def forget(self) -> None:
        """The run has come to its end: the next one in this directory is another."""
        self.path.unlink(missing_ok=True)
