"""What was found before a setting was changed, on the disk, whole, before anything changes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path


def write_found(record: Path, found: Mapping[str, int | str]) -> None:
    """Write it so that it outlives this process and a power failure."""
    partial = record.with_suffix(".new")
    with partial.open("w") as file:
        json.dump(dict(found), file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(record)
