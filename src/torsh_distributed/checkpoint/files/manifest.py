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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from torsh_distributed.checkpoint.files.block_hashes import BLOCK_BYTES, FileDamage, FileRecord, damaged, hash_of
from torsh_distributed.errors import CheckpointError

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
        """As read; raises ValueError, KeyError or TypeError for anything that `to_bytes` did not make."""
        value = json.loads(data)
        known = CheckpointMetadata.__dataclass_fields__
        metadata = {key: entry for key, entry in value["metadata"].items() if key in known}
        return cls(
            metadata=CheckpointMetadata(**metadata),
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
    marker = _read(directory, MARKER)
    _refuse_newer(directory, marker)
    text = _read(directory, MANIFEST)
    if marker != marker_for(text):
        name = MARKER if _names_other_bytes(marker) else MANIFEST
        raise damaged(directory, [FileDamage(name, "manifest and marker do not belong together", 0, len(text))])
    try:
        return Manifest.from_bytes(text)
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(directory, [FileDamage(MANIFEST, f"it is not a manifest: {error}")]) from error


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory has a marker; the rest is not looked at."""
    return (directory / MARKER).is_file() and not directory.is_symlink()


def _refuse_newer(directory: Path, marker: bytes) -> None:
    try:
        number = json.loads(marker)["format"]
    except (ValueError, KeyError, TypeError) as error:
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
    except (ValueError, KeyError, TypeError):
        return True


def _read(directory: Path, name: str) -> bytes:
    path = directory / name
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        reason = "it is a symbolic link" if path.is_symlink() else (error.strerror or str(error)).lower()
        raise damaged(directory, [FileDamage(name, f"cannot be read: {reason}")]) from error
    with os.fdopen(file, "rb") as stream:
        return stream.read(_MOST_MANIFEST_BYTES)


def _plain(name: str) -> str:
    """A file's name, refused if it leads out of the directory."""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is not a file of a checkpoint")
    return name
