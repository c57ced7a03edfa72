"""The bytes around a tensor's own that make it a file of `torch.save`, so torch reads what we write without us.

`torch.save` writes a zip archive of stored entries: a small pickle that describes the tensor, and its bytes. Written
here, because the tensor's bytes then need not exist yet: they are copied from the device straight to their place.
The entries' checksums are left at 0, as `torch.serialization.set_crc32_options(False)` does; ours are in the manifest.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from torsh_distributed.checkpoint.torch_internals import _rebuild_tensor_v2, _rebuild_tensor_v3

ALIGNMENT = 64
"""Bytes: a tensor's data starts on a multiple of it, as torch's does."""

_LOCAL, _CENTRAL, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
_PAD = struct.Struct("<2sH")


@dataclass(frozen=True)
class TensorArchive:
    """A zip archive around the bytes of one tensor: `head`, the tensor's bytes, `tail`."""

    head: bytes
    num_data_bytes: int
    tail: bytes

    @property
    def num_bytes(self) -> int:
        """Of the whole archive."""
        return len(self.head) + self.num_data_bytes + len(self.tail)


def archive_for(dtype: torch.dtype, shape: Sequence[int]) -> TensorArchive:
    """The archive for a contiguous tensor, at a position that is a multiple of `ALIGNMENT`."""
    num_data_bytes = torch.Size(shape).numel() * dtype.itemsize
    before = {"data.pkl": _description(dtype, shape), "byteorder": b"little"}
    head, entries = bytearray(), []
    for name, data in before.items():
        entries.append((name, len(data), len(head)))
        head += _entry(name, len(data), len(head)) + data
    entries.append(("data/0", num_data_bytes, len(head)))
    head += _entry("data/0", num_data_bytes, len(head))
    version = b"3\n"
    at = len(head) + num_data_bytes
    tail = bytearray(_entry("version", len(version), at, aligned=False) + version)
    entries.append(("version", len(version), at))
    directory = b"".join(_listing(*one) for one in entries)
    end = _END.pack(
        b"PK\5\6", 0, 0, len(entries), len(entries), len(directory), len(head) + num_data_bytes + len(tail), 0
    )
    return TensorArchive(bytes(head), num_data_bytes, bytes(tail) + directory + end)


def _entry(name: str, size: int, at: int, *, aligned: bool = True) -> bytes:
    """The header of a stored entry at position `at`, padded so that its data is aligned."""
    path = f"archive/{name}".encode()
    padding = b""
    if aligned:
        start = at + _LOCAL.size + len(path) + _PAD.size
        padding = _PAD.pack(b"FB", -start % ALIGNMENT) + b"Z" * (-start % ALIGNMENT)
    return _LOCAL.pack(b"PK\3\4", 20, 0, 0, 0, 0, 0, size, size, len(path), len(padding)) + path + padding


def _listing(name: str, size: int, at: int) -> bytes:
    path = f"archive/{name}".encode()
    return _CENTRAL.pack(b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, size, size, len(path), 0, 0, 0, 0, 0, at) + path


class _Storage:
    """Stands for the tensor's bytes in the pickle."""

    def __init__(self, kind: Any, numel: int) -> None:
        self.kind, self.numel = kind, numel


class _Description:
    """Stands for the tensor: pickled as the call that builds it."""

    def __init__(self, call: Any, arguments: tuple[Any, ...]) -> None:
        self._call, self._arguments = call, arguments

    @override
    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call, self._arguments


class _Pickler(pickle.Pickler):
    @override
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, "0", "cpu", obj.numel) if isinstance(obj, _Storage) else None


def _description(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """What `torch.save` pickles for a contiguous tensor: a call, with the storage by reference."""
    size = torch.Size(shape)
    strides = torch.empty(size, device="meta").stride()
    kind = _legacy_storages().get(dtype)
    if kind is not None:
        storage = _Storage(kind, size.numel())
        arguments: tuple[Any, ...] = (storage, 0, tuple(size), strides, False, OrderedDict())
        call: Any = _rebuild_tensor_v2
    else:
        storage = _Storage(torch.UntypedStorage, size.numel() * dtype.itemsize)
        arguments = (storage, 0, tuple(size), strides, False, OrderedDict(), dtype, None)
        call = _rebuild_tensor_v3
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(_Description(call, arguments))
    return stream.getvalue()


def _legacy_storages() -> dict[torch.dtype, Any]:
    """The storage class that torch names in files, for the dtypes that have one."""
    from torsh_distributed.checkpoint.torch_internals import _dtype_to_storage_type_map

    return {dtype: getattr(torch, name) for dtype, name in _dtype_to_storage_type_map().items() if hasattr(torch, name)}
