"""Hashes of files, block by block: damage has a place, and several ranks can check one file.

xxh3_128 is not cryptographic: it finds damage, not forgery. It is faster than any disk, and the library releases the
interpreter while it hashes, so a thread beside training may do it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash
from typing_extensions import override

from torsh_distributed.checkpoint.files.mapped_file import MappedFile
from torsh_distributed.errors import CheckpointError

BLOCK_BYTES = 8 << 20

_BLOCKS_AHEAD = 4
_SYNC_FILE_RANGE_WRITE = 2

Progress = Callable[[int], None]
"""Called with the number of bytes read since the last call."""


@dataclass(frozen=True)
class FileRecord:
    """Size of a file and the xxh3_128 of each of its blocks of `BLOCK_BYTES`, the last one shorter."""

    num_bytes: int
    hashes: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """As in the manifest."""
        return {"bytes": self.num_bytes, "hashes": list(self.hashes)}

    @classmethod
    def from_json(cls, value: dict[str, object]) -> Self:
        """From the manifest; raises ValueError, KeyError or TypeError for anything else."""
        num_bytes, hashes = value["bytes"], value["hashes"]
        if type(num_bytes) is not int or not 0 <= num_bytes < 2**63 or not isinstance(hashes, list):
            raise TypeError("a file has bytes and hashes")
        if len(hashes) != -(-num_bytes // BLOCK_BYTES) or not all(isinstance(one, str) for one in hashes):
            raise ValueError("a file has one hash for each block")
        return cls(num_bytes, tuple(hashes))


def hash_of(data: bytes | bytearray | memoryview) -> str:
    """The xxh3_128 of some bytes, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of(data: bytes) -> bytes:
    """The xxh3_128 of some bytes, in 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def record_of(data: bytes | memoryview) -> FileRecord:
    """The record of a file with these contents."""
    view = memoryview(data)
    starts = range(0, len(view), BLOCK_BYTES)
    return FileRecord(len(view), tuple(hash_of(view[start : start + BLOCK_BYTES]) for start in starts))


class HashedFile:
    """A new file, hashed while it is written, and on the disk once closed.

    Refuses to replace a file or to follow a link. The OSError of a full disk names the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self._hashes: list[str] = []
        self._block = xxhash.xxh3_128()
        self._in_block = 0
        self.num_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes: written and hashed a block at a time, while it is in the cache."""
        view = memoryview(data)
        while len(view):
            part = view[: BLOCK_BYTES - self._in_block]
            self._write_all(part)
            self._block.update(part)
            self._in_block += len(part)
            self.num_bytes += len(part)
            if self._in_block == BLOCK_BYTES:
                self._end_block()
            view = view[len(part) :]

    def close(self) -> FileRecord:
        """Wait until the disk has it; returns its record."""
        try:
            os.fsync(self._file)
        except OSError as error:  # a quota, or a full disk behind a network, may be noticed only now
            raise self._named(error) from error
        finally:
            self.abandon()
        if self._in_block:
            self._end_block()
        return FileRecord(self.num_bytes, tuple(self._hashes))

    def abandon(self) -> None:
        """Close it without waiting for the disk."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _write_all(self, part: memoryview) -> None:
        done = 0
        while done < len(part):
            try:
                done += os.write(self._file, part[done:])
            except OSError as error:
                raise self._named(error) from error

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, os.strerror(error.errno or 0), str(self._path))

    def _end_block(self) -> None:
        if self._file >= 0:
            start_writing(self._file, len(self._hashes) * BLOCK_BYTES, BLOCK_BYTES)
        self._hashes.append(self._block.hexdigest())
        self._block.reset()
        self._in_block = 0


def start_writing(file: int, start: int, length: int) -> None:
    """Let the disk begin with these bytes while the next ones are copied and hashed; only `fsync` waits for it.

    A hint: file systems that do not take it write at `fsync`, as without it.
    """
    _libc().sync_file_range(file, ctypes.c_int64(start), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def write_file(path: Path, data: bytes) -> FileRecord:
    """Write a small new file, and wait until the disk has it."""
    file = HashedFile(path)
    try:
        file.write(data)
        return file.close()
    finally:
        file.abandon()


@dataclass(frozen=True)
class FileDamage:
    """A file that is not what the manifest says: where, and how it differs."""

    file: str
    reason: str
    start: int = 0
    stop: int = 0

    @override
    def __str__(self) -> str:
        """In words: `__0_0.distcp, bytes 8388608 to 16777216: the hash differs`."""
        where = f", bytes {self.start} to {self.stop}" if self.stop else ""
        return f"{self.file}{where}: {self.reason}"


def check_file(
    directory: Path,
    name: str,
    record: FileRecord,
    blocks: Sequence[int] | None = None,
    progress: Progress | None = None,
    opened: dict[str, MappedFile] | None = None,
) -> list[FileDamage]:
    """Read a file, or some of its blocks, and compare it with its record; `opened` gets it, to be read again."""
    try:
        file = MappedFile(directory / name)
    except OSError as error:
        reason = "it is a symbolic link" if (directory / name).is_symlink() else (error.strerror or str(error)).lower()
        return [FileDamage(name, f"cannot be read: {reason}")]
    if opened is not None:
        opened[name] = file
    if file.num_bytes != record.num_bytes:
        low, high = sorted((file.num_bytes, record.num_bytes))
        reason = f"it has {file.num_bytes} bytes, and {record.num_bytes} were written"
        return [FileDamage(name, reason, low, high)]
    chosen = range(len(record.hashes)) if blocks is None else blocks
    return _differing_blocks(file, name, record, chosen, progress)


def _differing_blocks(
    file: MappedFile, name: str, record: FileRecord, blocks: Sequence[int], progress: Progress | None
) -> list[FileDamage]:
    found = []
    bounds = [(number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, record.num_bytes)) for number in blocks]
    for start, stop in bounds[:_BLOCKS_AHEAD]:
        file.start_reading(start, stop)
    for place, (number, (start, stop)) in enumerate(zip(blocks, bounds, strict=True)):
        for ahead in bounds[place + _BLOCKS_AHEAD : place + _BLOCKS_AHEAD + 1]:
            file.start_reading(*ahead)
        try:
            is_equal = hash_of(file.view(start, stop)) == record.hashes[number]
        except OSError as error:
            found.append(FileDamage(name, f"cannot be read: {(error.strerror or str(error)).lower()}", start, stop))
            continue
        if not is_equal:
            found.append(FileDamage(name, "the bytes are not those that were written", start, stop))
        if progress is not None:
            progress(stop - start)
    return found


def damaged(where: Path, damage: Sequence[FileDamage]) -> CheckpointError:
    """The error for a damaged checkpoint, naming up to three places."""
    shown = "; ".join(str(one) for one in damage[:3]) + (f"; and {len(damage) - 3} more" if len(damage) > 3 else "")
    return CheckpointError(
        f"{where.name} is damaged: {shown}",
        hint="load an older step, or copy the file again from where it was stored",
        path=str(where),
    )
