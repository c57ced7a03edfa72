"""What a call carries: plain values, tensors, arrays, registered dataclasses, references, functions by name.

::

    head = bytes of the table (2) | table of buffers | message (MessagePack)

Tensors and long texts are buffers: the table has their kind and shape, the message their index, and their bytes are
the payload of the frame, or in a memory file on one node. So a receiver allocates what was announced, after it has
checked that the sizes fit, and receives into it.
"""

from __future__ import annotations

import dataclasses
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgpack
import numpy as np
import torch
from torch import Tensor

from torsh_distributed.comm.serialization import TAGS
from torsh_distributed.errors import SerializationError, TorshError

TABLE_BYTES = struct.Struct("!H")
MOST_BUFFERS = 4096
_LONG_BYTES = 1 << 15
"""Texts from this size on are buffers where the head would be too long."""
HEAD_BYTES = 1 << 20
"""The longest head: a list of small values takes up to 64 times as much memory once it is read."""
BYTES_KIND, TEXT_KIND, FILE_KIND = -1, -2, -3
"""In place of a dtype's tag."""
_NO_TABLE = TABLE_BYTES.pack(0)


class Ext:
    """The extensions of MessagePack: part of the format, so numbers are never reused."""

    TENSOR, TUPLE, SET, COMPLEX, BIG_INT, BUFFER, DATACLASS, REFERENCE, FUNCTION, ARRAY = range(1, 11)


class ValueRegistry(Protocol):
    """What may travel beyond plain values, by name."""

    def name_of_value(self, kind: type) -> str | None:
        """The name of a registered dataclass."""

    def value_class(self, name: str) -> type | None:
        """The dataclass of that name."""

    def name_of_function(self, function: Callable[..., Any]) -> str | None:
        """The name of an exposed function."""

    def function(self, name: str) -> Callable[..., Any] | None:
        """The exposed function of that name."""

    def pack_reference(self, value: Any) -> list[Any] | None:
        """A reference as plain values; None if it is not one."""

    def open_reference(self, packed: list[Any]) -> Any:
        """The reference that the values describe."""


class Encoded(NamedTuple):
    """A message as bytes, with the memory of its buffers."""

    table: Sequence[list[int]]
    body: bytes
    parts: Sequence[memoryview]
    num_payload: int

    def head(self, *, is_file: bool = False) -> bytes:
        """The head of the frame; the payload is in a file that goes along, or follows."""
        if not self.table:
            return _NO_TABLE + self.body
        table: bytes = msgpack.packb([[FILE_KIND, self.num_payload], *self.table] if is_file else self.table)
        if len(table) >= 1 << 16:
            raise SerializationError(
                "too many tensors in one call",
                hint="send them in several calls, or as one tensor",
                num_tensors=len(self.table),
            )
        return TABLE_BYTES.pack(len(table)) + table + self.body


class _Unsendable(Exception):
    """A part of a value cannot travel."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part


class _Long:
    """A long text or bytes, to be sent as a buffer."""

    def __init__(self, value: str | bytes) -> None:
        self.data = value.encode() if isinstance(value, str) else value
        self.kind = TEXT_KIND if isinstance(value, str) else BYTES_KIND


class _Encoder:
    """Packs one message, and collects its buffers."""

    def __init__(self, registry: ValueRegistry) -> None:
        self._registry = registry
        self.table: list[list[int]] = []
        self.parts: list[memoryview] = []

    def pack(self, value: Any) -> bytes:
        packed: bytes = msgpack.packb(value, default=self.extend, strict_types=True)
        return packed

    def extend(self, value: Any) -> Any:
        """What MessagePack does not have, as an extension."""
        if isinstance(value, Tensor):
            return msgpack.ExtType(Ext.TENSOR, self._add(_table_row(value), _bytes_of(value)))
        if isinstance(value, np.ndarray):
            return msgpack.ExtType(Ext.ARRAY, self._add(*_array_buffer(value)))
        if isinstance(value, tuple):
            return msgpack.ExtType(Ext.TUPLE, self.pack(list(value)))
        if isinstance(value, set | frozenset):
            return msgpack.ExtType(Ext.SET, self.pack(list(value)))
        if isinstance(value, complex):
            return msgpack.ExtType(Ext.COMPLEX, struct.pack("<dd", value.real, value.imag))
        if isinstance(value, _Long):
            return msgpack.ExtType(Ext.BUFFER, self._add([value.kind, len(value.data)], memoryview(value.data)))
        if isinstance(value, int):
            return msgpack.ExtType(
                Ext.BIG_INT, int(value).to_bytes(int(value).bit_length() // 8 + 1, "little", signed=True)
            )
        if isinstance(value, np.bool_ | np.number) and not isinstance(value, float):
            return value.item()
        kinds: tuple[type, ...] = (float, str, bytes, dict, list)
        plain = next((kind for kind in kinds if isinstance(value, kind)), None)
        return self._registered(value) if plain is None else plain(value)  # of a subclass its value travels

    def _registered(self, value: Any) -> Any:
        reference = self._registry.pack_reference(value)
        if reference is not None:
            return msgpack.ExtType(Ext.REFERENCE, self.pack(reference))
        name = self._registry.name_of_value(type(value))
        if name is not None:
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return msgpack.ExtType(Ext.DATACLASS, self.pack([name, fields]))
        name = self._registry.name_of_function(value) if callable(value) else None
        if name is None:
            raise _Unsendable(value)
        return msgpack.ExtType(Ext.FUNCTION, name.encode())

    def _add(self, row: list[int], data: memoryview) -> bytes:
        if len(self.table) >= MOST_BUFFERS:
            raise SerializationError(
                "too many tensors in one call", hint="send them in several calls", most=MOST_BUFFERS
            )
        self.table.append(row)
        self.parts.append(data)
        return TABLE_BYTES.pack(len(self.table) - 1)


class _PlainPacker(threading.local):
    """Packs plain values, which most small calls have, without the cost of making a packer for each."""

    def __init__(self) -> None:
        self.pack = msgpack.Packer(strict_types=True).pack


_plain = _PlainPacker()


def encode(message: list[Any], registry: ValueRegistry) -> Encoded:
    """A message as bytes. SerializationError, with the path, if a part of it cannot travel."""
    try:
        body = _plain.pack(message)
    except (TypeError, ValueError, OverflowError):
        return _encode_all(message, registry)
    return Encoded((), body, (), 0) if len(body) <= HEAD_BYTES // 2 else _encode_all(message, registry)


def _encode_all(message: list[Any], registry: ValueRegistry) -> Encoded:
    """What has more than plain values in it."""
    encoder = _Encoder(registry)
    try:
        try:
            body = encoder.pack(message)
        except OverflowError:  # an integer beyond 64 bits, which MessagePack refuses before it asks
            body = _repacked(encoder, message)
        if len(body) > HEAD_BYTES // 2:
            encoder = _Encoder(registry)
            body = _repacked(encoder, message)
    except _Unsendable as error:
        raise _cannot_send(message, error.part) from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, TorshError):
            raise
        raise SerializationError("the value contains itself, or is nested too deeply", reason=str(error)) from error
    return Encoded(encoder.table, body, encoder.parts, sum(map(len, encoder.parts)))


def _repacked(encoder: _Encoder, message: list[Any]) -> bytes:
    encoder.table.clear()
    encoder.parts.clear()
    body = encoder.pack(_with_long_parts(message))
    if len(body) > HEAD_BYTES - (1 << 16):
        raise SerializationError(
            "the values of a call take more than a megabyte besides tensors and long texts",
            hint="put many numbers into a tensor, or many texts into one",
            num_bytes=len(body),
        )
    return body


def _with_long_parts(value: Any) -> Any:
    """The value, with what is a buffer marked: long texts; and integers that MessagePack does not have."""
    if isinstance(value, str | bytes) and len(value) >= _LONG_BYTES:
        return _Long(value)
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**64:
        return msgpack.ExtType(Ext.BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if isinstance(value, list):
        return [_with_long_parts(part) for part in value]
    if type(value) is tuple:
        return tuple(_with_long_parts(part) for part in value)
    if isinstance(value, dict):
        return {key: _with_long_parts(part) for key, part in value.items()}
    return value


def _cannot_send(message: Any, part: Any) -> SerializationError:
    labels = {2: "the result", 4: "args", 5: "kwargs"}
    paths = (_path_to(one, part, labels.get(index, "the message")) for index, one in enumerate(message))
    path = next((found for found in paths if found is not None), "the value")
    if isinstance(part, torch.nn.Module):
        hint = "send its state_dict(), and load that into a module that the receiver has built; code does not travel"
    else:
        hint = (
            "numbers, text, bytes, lists, tuples, sets, dicts, tensors and arrays of numbers travel, and dataclasses "
            "that both sides registered with rpc.sendable; functions only if they were exposed"
        )
    return SerializationError(f"{path} cannot be sent: it is a {type(part).__name__}", hint=hint, path=path)


def _path_to(value: Any, part: Any, path: str) -> str | None:
    """Where in a value the part is, as one would write it."""
    if value is part:
        return path
    inner: list[tuple[str, Any]] = []
    if isinstance(value, list | tuple | set | frozenset):
        inner = [(f"[{index}]", one) for index, one in enumerate(value)]
    elif isinstance(value, dict):
        inner = [(f"[{key!r}]", one) for key, one in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    for step, one in inner:
        found = _path_to(one, part, path + step)
        if found is not None:
            return found
    return None


def _table_row(tensor: Tensor) -> list[int]:
    tag = TAGS.get(tensor.dtype)
    if tag is None or tensor.layout != torch.strided:
        raise SerializationError(
            "this kind of tensor cannot be sent",
            hint="send a dense tensor of an ordinary dtype",
            dtype=str(tensor.dtype),
            layout=str(tensor.layout),
        )
    return [tag, int(tensor.is_cuda), *tensor.shape]


def _array_buffer(array: np.ndarray[Any, Any]) -> tuple[list[int], memoryview]:
    """An array of NumPy as a row of the table and its bytes."""
    try:
        tag = TAGS[torch.from_numpy(np.empty(0, array.dtype)).dtype]
    except (TypeError, ValueError, KeyError):  # of objects or texts, or in another order of bytes
        raise _Unsendable(array) from None
    return [tag, 0, *array.shape], np.asarray(array, order="C").reshape(-1).view(np.uint8).data


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's own memory, or that of a copy where it is not in one piece or not on the CPU."""
    if not tensor.numel():
        return memoryview(b"")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().data
