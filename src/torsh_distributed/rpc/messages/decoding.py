"""From the bytes of a message to values: what is announced is checked before memory is taken for it."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import torch
from torch import Tensor

from torsh_distributed.comm.serialization import DTYPES
from torsh_distributed.comm.transport.frames import BadFrame
from torsh_distributed.errors import MemoryAllocationFailed
from torsh_distributed.rpc.messages.encoding import (
    FILE_KIND,
    MOST_BUFFERS,
    TABLE_BYTES,
    TEXT_KIND,
    Ext,
    ValueRegistry,
)
from torsh_distributed.rpc.messages.payload_files import ReceivedFiles, places_of

_HUGE_BYTES = 4 << 20
"""From here on memory is in huge pages, which are 2 MB."""
_MOST_DIMS, _MOST_NESTING = 64, 64


def open_message(
    received: ReceivedFiles, files: deque[int], head: memoryview, num_payload: int
) -> tuple[Opened, list[memoryview]]:
    """Check a head and take memory for the buffers that it announces: the parts of the payload, in order."""
    if len(head) < TABLE_BYTES.size:
        raise BadFrame("a head without a table")
    (num_table,) = TABLE_BYTES.unpack_from(head)
    if not num_table:
        if num_payload:
            raise BadFrame("a payload that the head does not announce")
        return Opened(bytes(head[TABLE_BYTES.size :]), (), []), []
    body_start = TABLE_BYTES.size + num_table
    if len(head) < body_start:
        raise BadFrame("a head that ends within its table")
    rows = _checked_rows(head[TABLE_BYTES.size : body_start])
    body = bytes(head[body_start:])
    if rows and rows[0][0] == FILE_KIND:
        return Opened(body, rows[1:], _file_buffers(received, rows[0][1], rows[1:], files)), []
    if sum(map(_row_bytes, rows)) != num_payload:
        raise BadFrame("a payload that is not as long as the tensors it has")
    views: list[memoryview] = []
    buffers: list[Any] = []
    for row in rows:
        num_bytes = _row_bytes(row)
        if row[0] < 0:
            memory = bytearray(num_bytes)
            buffers.append(memory)
            views.append(memoryview(memory))
            continue
        flat = _memory(num_bytes)
        buffers.append(flat)
        views.append(flat.numpy().data if num_bytes else memoryview(b""))
    return Opened(body, rows, buffers), views


def _memory(num_bytes: int) -> Tensor:
    """Memory that is about to be received into: in huge pages where it is large, since the kernel clears and maps each
    page when its first byte arrives, which takes as long as the bytes take to arrive."""
    if num_bytes < _HUGE_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryAllocationFailed(
            "there is no memory for a tensor that arrives", hint="send it in several calls", num_bytes=num_bytes
        ) from error
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps it


def _checked_rows(table: memoryview) -> list[list[int]]:
    try:
        rows = msgpack.unpackb(table)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadFrame(f"a table that cannot be read: {error}") from error
    if not isinstance(rows, list) or not 0 < len(rows) <= MOST_BUFFERS + 1:
        raise BadFrame("a table that is not a list of rows")
    for index, row in enumerate(rows):
        is_row = isinstance(row, list) and 2 <= len(row) <= _MOST_DIMS + 2 and all(type(one) is int for one in row)
        if not is_row or not (FILE_KIND if index == 0 else TEXT_KIND) <= row[0] < len(DTYPES) or min(row[1:]) < 0:
            raise BadFrame("a table with a row that is not valid")
        if row[0] < 0 and len(row) != 2:
            raise BadFrame("a table with a text that has a shape")
    return rows


def _row_bytes(row: Sequence[int]) -> int:
    return row[1] if row[0] < 0 else math.prod(row[2:]) * DTYPES[row[0]].itemsize


def _file_buffers(
    received: ReceivedFiles, num_bytes: int, rows: Sequence[Sequence[int]], files: deque[int]
) -> list[Any]:
    """The buffers in a memory file that arrived with the head: nothing is copied, but texts."""
    if not files:
        raise BadFrame("a head that announces a file that did not arrive")
    file = files.popleft()
    sizes = list(map(_row_bytes, rows))
    places = places_of(sizes)
    if not sum(sizes) == num_bytes > 0:
        os.close(file)
        raise BadFrame("a memory file with other tensors than its head has")
    memory = received.open(file, places[-1])
    buffers: list[Any] = []
    for row, start, num_row in zip(rows, places, sizes, strict=False):
        part = memory[start : start + num_row]
        if row[0] < 0:
            buffers.append(part.tobytes())
        else:
            # A view keeps the array, and so the file, whatever becomes of the other tensors.
            buffers.append(torch.from_numpy(part) if num_row else torch.empty(0, dtype=torch.uint8))
    return buffers


class Opened:
    """A message whose buffers may still be arriving."""

    __slots__ = ("_body", "_buffers", "_depth", "_registry", "_rows", "_unknown")

    def __init__(self, body: bytes, rows: Sequence[Sequence[int]], buffers: list[Any]) -> None:
        self._body = body
        self._rows = rows
        self._buffers = buffers
        self._registry: ValueRegistry
        self._depth = 0
        self._unknown: str | None = None

    def read(self, registry: ValueRegistry) -> list[Any]:
        """The message, once its buffers are here; BadFrame if it is not one. What is not known here ends it by name."""
        self._registry = registry
        try:
            message = msgpack.unpackb(self._body, ext_hook=self._shrink, strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException, RecursionError, struct.error, LookupError) as error:
            raise BadFrame(f"a message that cannot be read: {error}") from error
        if not isinstance(message, list) or len(message) < 2:
            raise BadFrame("a message that is not a list")
        if self._unknown is not None:
            message.append(UnknownPart(self._unknown))
        return message

    def _inner(self, data: bytes) -> Any:
        self._depth += 1
        if self._depth > _MOST_NESTING:
            raise ValueError("nested too deeply")
        value = msgpack.unpackb(data, ext_hook=self._shrink, strict_map_key=False)
        self._depth -= 1
        return value

    def _shrink(self, code: int, data: bytes) -> Any:
        if code == Ext.TENSOR:
            return self._tensor(*TABLE_BYTES.unpack(data))
        if code == Ext.ARRAY:
            return self._tensor(*TABLE_BYTES.unpack(data)).numpy()
        if code == Ext.TUPLE:
            return tuple(self._inner(data))
        if code == Ext.SET:
            return set(self._inner(data))
        if code == Ext.COMPLEX:
            return complex(*struct.unpack("<dd", data))
        if code == Ext.BIG_INT:
            return int.from_bytes(data, "little", signed=True)
        if code == Ext.BUFFER:
            (index,) = TABLE_BYTES.unpack(data)
            text = bytes(self._buffers[index])
            return text.decode() if self._rows[index][0] == TEXT_KIND else text
        return self._registered(code, data)

    def _tensor(self, index: int) -> Tensor:
        row, flat = self._rows[index], self._buffers[index]
        if row[0] < 0:
            raise ValueError("a text where a tensor should be")
        tensor: Tensor = flat.view(DTYPES[row[0]]).view(row[2:])
        # A tensor of a GPU goes to the receiver's own device, where it has one.
        return tensor.cuda() if row[1] and torch.cuda.is_available() else tensor

    def _registered(self, code: int, data: bytes) -> Any:
        if code == Ext.REFERENCE:
            return self._registry.open_reference(self._inner(data))
        if code == Ext.FUNCTION:
            name = data.decode()
            function = self._registry.function(name)
            return function if function is not None else self._not_known("function", name)
        if code != Ext.DATACLASS:
            raise ValueError(f"an unknown extension {code}")
        name, fields = self._inner(data)
        kind = self._registry.value_class(name)
        if kind is None:
            return self._not_known("dataclass", name)
        try:
            return kind(**fields)
        except Exception as error:  # the class may refuse its fields in any way
            return self._not_known("dataclass", f"{name} ({error})")

    def _not_known(self, what: str, name: str) -> None:
        self._unknown = f"{what} {name}"


class UnknownPart(NamedTuple):
    """Ends a message, a part of which this process does not know by name."""

    name: str
