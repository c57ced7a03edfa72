"""What a checkpoint consists of: the manifest with every file's size and hashes, and the marker that makes it one.

    step-00000100/
    ├── __0_0.distcp, __1_0.distcp, …   tensors, one file per rank, as torch.distributed.checkpoint writes them
    ├── .metadata                       the index of those for torch; a pickle, which we write and never read
    ├── tensors.json                    the same index for us
    ├── shared.state, rank-0.state, …   values that are not tensors: equal on all ranks, or a rank's own (MessagePack)
    ├── manifest.json                   size and hashes of all files above, step, loss, world, plan
    └── COMMITTED                       size and hash of the manifest; written last

A directory without a marker is not a checkpoint. A format's number grows when older versions could misread it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from torsh_distributed.checkpoint.files.block_hashes import BLOCK_BYTES, FileDamage, FileRecord, damaged, hash_of
from torsh_distributed.checkpoint.files.mapped_file import open_plain
from torsh_distributed.errors import CheckpointError
from torsh_distributed.unreadable_data import reason_of

FORMAT = 1
MANIFEST, MARKER, TENSORS, DCP_INDEX, SHARED = "manifest.json", "COMMITTED", "tensors.json", ".metadata", "shared.state"
_MOST_MANIFEST_BYTES = 1 << 30


def data_file(rank: int) -> str:
    """The file of a rank's tensors."""
    return f"__{rank}_0.distcp"


def own_file(rank: int) -> str:
    """The file of a rank's own values."""
    return f"rank-{rank}.state"


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """What is known of a checkpoint without loading it."""

    step: int
    epoch: int = 0
    loss: float | None = None
    """Of the step, or the metric given with it; the lowest is the best."""
    learning_rate: float | None = None
    time: float = 0.0
    """Wall-clock seconds since the epoch when it was saved."""
    world_size: int = 1
    mesh: dict[str, int] = field(default_factory=dict)
    """Degrees of the axes it was saved under."""
    plan: dict[str, Any] | None = None
    plan_hash: str | None = None
    git_commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    """Of torsh-distributed, torch and Python."""
    reason: str = "asked"
    """Why it was saved: steps, time, best, signal, request or asked."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint and its metadata."""

    metadata: CheckpointMetadata
    files: dict[str, FileRecord]
    compression: str | None = None
    """zstd, or None for plain bytes."""

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(record.num_bytes for record in self.files.values())

    def to_bytes(self) -> bytes:
        """As written."""
        files = {name: record.to_json() for name, record in sorted(self.files.items())}
        value = {
            "format": FORMAT,
            "metadata": asdict(self.metadata),
            "compression": self.compression,
            "hash": "xxh3_128",
            "block_bytes": BLOCK_BYTES,
            "files": files,
        }
        return json.dumps(value, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """As read; raises ValueError, KeyError, TypeError or RecursionError for what `to_bytes` did not make."""
        value = json.loads(data)
        if value["compression"] not in (None, "zstd"):
            raise ValueError(f"the compression {value['compression']!r} is not known")
        return cls(
            metadata=_metadata_of(value["metadata"]),
            files={_plain(name): FileRecord.from_json(record) for name, record in value["files"].items()},
            compression=value["compression"],
        )


def marker_for(manifest: bytes) -> bytes:
    """The contents of the marker for a manifest."""
    value = {"format": FORMAT, "manifest": {"bytes": len(manifest), "xxh3_128": hash_of(manifest)}}
    return json.dumps(value).encode()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint, checked against its marker; CheckpointError names what is damaged or missing.

    The other files are not read. A checkpoint of a newer version is refused by its number.
    """
    marker = read_plain(directory, MARKER)
    _refuse_newer(directory, marker)
    text = read_plain(directory, MANIFEST)
    if marker != marker_for(text):
        name = MARKER if _names_other_bytes(marker) else MANIFEST
        raise damaged(directory, [FileDamage(name, "manifest and marker do not belong together", 0, len(text))])
    try:
        return Manifest.from_bytes(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(directory, [FileDamage(MANIFEST, f"it is not a manifest: {reason_of(error)}")]) from error


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory has a marker; the rest is not looked at."""
    return (directory / MARKER).is_file() and not directory.is_symlink()


def _refuse_newer(directory: Path, marker: bytes) -> None:
    try:
        number = json.loads(marker)["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(directory, [FileDamage(MARKER, "it is not a marker", 0, len(marker))]) from error
    if isinstance(number, int) and number > FORMAT and marker == json.dumps(json.loads(marker)).encode():
        raise CheckpointError(
            f"{directory.name} is of format {number} ({MARKER} says so), and this version reads formats up to {FORMAT}",
            hint="upgrade torsh-distributed to load it; if no newer version wrote it, that file is damaged",
            newer_format=number,
            path=str(directory),
        )


def _names_other_bytes(marker: bytes) -> bool:
    """Whether the marker is not even of the form that is written."""
    try:
        value = json.loads(marker)
        again = {"format": FORMAT, "manifest": {key: value["manifest"][key] for key in ("bytes", "xxh3_128")}}
        return marker != json.dumps(again).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return True


def read_plain(directory: Path, name: str) -> bytes:
    """The contents of a small file of a checkpoint; CheckpointError if it is a link, no file, or cannot be read."""
    path = directory / name
    try:
        with os.fdopen(open_plain(path), "rb") as stream:
            return stream.read(_MOST_MANIFEST_BYTES)
    except OSError as error:
        reason = "it is a symbolic link" if path.is_symlink() else (error.strerror or str(error)).lower()
        raise damaged(directory, [FileDamage(name, f"cannot be read: {reason}")]) from error


_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_MOST = 2**63 - 1
_LAST_TIME = 253_402_300_799.0
"""The last second of the year 9999: what Python can show as a date."""


def _plain(name: str) -> str:
    """A file's name, refused if it leads out of the directory or is none that is written there."""
    if not _FILE_NAME.fullmatch(name) or name in (".", "..", MANIFEST, MARKER):
        raise ValueError(f"{name[:200]!r} is not a file of a checkpoint")
    return name


def _metadata_of(given: dict[str, Any]) -> CheckpointMetadata:
    """The metadata with every value of the type and in the range that its field has."""
    known = CheckpointMetadata.__dataclass_fields__
    found = {key: entry for key, entry in given.items() if key in known}
    is_right: dict[str, Callable[[Any], bool]] = {
        "step": is_count,
        "epoch": is_count,
        "loss": lambda one: one is None or _is_number(one),
        "learning_rate": lambda one: one is None or _is_number(one),
        "time": lambda one: _is_number(one) and 0 <= one <= _LAST_TIME,
        "world_size": lambda one: is_count(one) and one > 0,
        "mesh": lambda one: isinstance(one, dict) and all(is_count(degree) for degree in one.values()),
        "plan": lambda one: one is None or isinstance(one, dict),
        "plan_hash": lambda one: one is None or isinstance(one, str),
        "git_commit": lambda one: one is None or isinstance(one, str),
        "versions": lambda one: isinstance(one, dict) and all(isinstance(text, str) for text in one.values()),
        "reason": lambda one: isinstance(one, str),
    }
    for key, value in found.items():
        if not is_right[key](value):
            raise ValueError(f"{key} is {str(value)[:60]!r}")
    return CheckpointMetadata(**found)


def is_count(value: object) -> bool:
    """Whether a value of a file is a whole number that a size, an offset or a step can be."""
    return type(value) is int and 0 <= value <= _MOST


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) <= _MOST)
