"""The file of a file store: a log of writes, each record whole or ignored.

::

    file    = "TORSHLG1" record*
    record  = body length (8) | CRC-32 of the body (4) | CRC-32 of those 12 bytes (4) | body
    body    = kind (1) | key length (4) | key | [boot id (16) | expiry, monotonic (8) | expiry, wall clock (8)] | value

A writer killed in the middle leaves a record that is shorter than it says: readers stop before it, the next
writer cuts it off. A record of full length with a wrong checksum is damage and is reported.
"""

from __future__ import annotations

import functools
import os
import struct
import time
import uuid
import zlib
from pathlib import Path

from torsh_distributed.comm.store.table import StoredValue, Table
from torsh_distributed.errors import IoError

_MAGIC = b"TORSHLG1"
_HEADER = struct.Struct("<QII")
_LENGTHS = struct.Struct("<QI")
_BODY = struct.Struct("<cI")
_EXPIRY = struct.Struct("<16sdd")
_SET, _SET_EXPIRING, _DELETE = b"S", b"X", b"D"
_READ_BYTES = 2**20
_REWRITE_FROM_BYTES = 2**20
_REWRITE_GROWTH = 4


class DamagedLog(Exception):
    """A record is complete, but its checksum is wrong."""


class FileLog:
    """The log at `path` and the table it results in. Not thread-safe; a writer must hold the store's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = Table()
        self._fd: int | None = None
        self._offset = 0
        self._rewrite_at = _REWRITE_FROM_BYTES

    def refresh(self) -> None:
        """Read what others have written since the last time."""
        # Reopened each time: a rewrite replaces the file, and on NFS only an open sees what others wrote.
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            self.forget()
            return
        if self._fd is None or not os.path.sameopenfile(fd, self._fd):
            self.forget()
        if self._fd is not None:
            os.close(self._fd)
        self._fd = fd
        self._read()

    def repair(self) -> None:
        """With the lock held and after a refresh: create the file, or cut off what a killed writer left."""
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._fd).st_size > self._offset:
            os.ftruncate(self._fd, self._offset)
        if self._offset == 0:
            _write(self._fd, _MAGIC, 0)
            self._offset = len(_MAGIC)

    def append(self, key: str, entry: StoredValue | None) -> None:
        """With the lock held and after a repair: record that the table now has this entry (None: was deleted)."""
        assert self._fd is not None
        record = _encode(key, entry)
        try:
            if self._offset + len(record) < self._rewrite_at:
                _write(self._fd, record, self._offset)
                self._offset += len(record)
            else:
                self._rewrite()
        except BaseException:
            self.forget()  # the table is ahead of the file
            raise

    def forget(self) -> None:
        """Drop what was read, so the next refresh starts from the beginning."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
        self._offset = 0
        self._rewrite_at = _REWRITE_FROM_BYTES
        self.table = Table()

    def _read(self) -> None:
        assert self._fd is not None
        end = os.fstat(self._fd).st_size
        if self._offset == 0:
            if end < len(_MAGIC):
                return
            if os.pread(self._fd, len(_MAGIC), 0) != _MAGIC:
                raise IoError(
                    "the file is not a store",
                    hint="give a path that does not exist yet; the store creates the file",
                    path=str(self.path),
                )
            self._offset = len(_MAGIC)
            self._rewrite_at = max(_REWRITE_FROM_BYTES, _REWRITE_GROWTH * end)
        while self._offset < end:
            body = self._read_record(end)
            if body is None:
                return
            self.table.put(*_decode(body))
            self._offset += _HEADER.size + len(body)

    def _read_record(self, end: int) -> bytes | None:
        """The body at the offset, or None if the record is not (yet) whole."""
        assert self._fd is not None
        if end - self._offset < _HEADER.size:
            return None
        header = os.pread(self._fd, _HEADER.size, self._offset)
        if len(header) < _HEADER.size:
            return None
        num_bytes, body_crc, header_crc = _HEADER.unpack(header)
        if zlib.crc32(header[: _LENGTHS.size]) != header_crc:
            raise DamagedLog
        start = self._offset + _HEADER.size
        if end - start < num_bytes:
            return None
        body = bytearray()
        while len(body) < num_bytes:
            piece = os.pread(self._fd, min(_READ_BYTES, num_bytes - len(body)), start + len(body))
            if not piece:
                return None
            body += piece
        if zlib.crc32(body) != body_crc:
            raise DamagedLog
        return bytes(body)

    def _rewrite(self) -> None:
        """Replace the log by one that holds the live keys only; readers notice the new file at their next refresh."""
        fresh = self.path.with_name(self.path.name + ".rewrite")
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write(fd, _MAGIC, 0)
            end = len(_MAGIC)
            for key, entry in self.table.items():
                record = _encode(key, entry)
                _write(fd, record, end)
                end += len(record)
            os.fsync(fd)
            fresh.replace(self.path)
        except BaseException:
            os.close(fd)
            raise
        assert self._fd is not None
        os.close(self._fd)
        self._fd = fd
        self._offset = end
        self._rewrite_at = max(_REWRITE_FROM_BYTES, _REWRITE_GROWTH * end)


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        num_bytes = os.pwrite(fd, view, offset)
        view = view[num_bytes:]
        offset += num_bytes


def _encode(key: str, entry: StoredValue | None) -> bytes:
    name = key.encode()
    if entry is None:
        body = _BODY.pack(_DELETE, len(name)) + name
    elif entry.expires_at is None:
        body = _BODY.pack(_SET, len(name)) + name + entry.value
    else:
        wall = entry.expires_at - time.monotonic() + time.time()
        expiry = _EXPIRY.pack(_boot_id(), entry.expires_at, wall)
        body = _BODY.pack(_SET_EXPIRING, len(name)) + name + expiry + entry.value
    lengths = _LENGTHS.pack(len(body), zlib.crc32(body))
    return lengths + struct.pack("<I", zlib.crc32(lengths)) + body


def _decode(body: bytes) -> tuple[str, StoredValue | None]:
    kind, num_key_bytes = _BODY.unpack_from(body)
    start = _BODY.size + num_key_bytes
    key = body[_BODY.size : start].decode()
    if kind == _DELETE:
        return key, None
    if kind == _SET:
        return key, StoredValue(body[start:])
    boot_id, expires_at, wall = _EXPIRY.unpack_from(body, start)
    if boot_id != _boot_id():
        # Written on another node, or before this one was restarted: only the wall clock is shared.
        expires_at = wall - time.time() + time.monotonic()
    return key, StoredValue(body[start + _EXPIRY.size :], expires_at)


@functools.cache
def _boot_id() -> bytes:
    """Which run of which kernel the monotonic clock belongs to."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
