"""Values as bytes and back, without pickle: what a peer sends is data, never code.

Plain values (None, bool, int, float, str, bytes, list, tuple, set, dict, complex) and tensors of every dtype
travel; the sender refuses everything else and names its path. The frame is MessagePack; tensors are an
extension: a header of 10 bytes (magic TSHT, version, dtype tag, number of dims, 3 reserved), the shape, the data.
"""

from __future__ import annotations

import math
import struct
import sys
from typing import Any

import msgpack
import torch
from torch import Tensor

from torsh_distributed.errors import SerializationError

_MAGIC = b"TSHT"
_VERSION = 1
_HEADER = struct.Struct("<4sBBB3x")
_MAX_DIMS = 64

# Tags are part of the wire format: append, never renumber.
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
TAGS = {dtype: tag for tag, dtype in enumerate(DTYPES)}

_EXT_TENSOR, _EXT_TUPLE, _EXT_SET, _EXT_COMPLEX, _EXT_BIG_INT = 1, 2, 3, 4, 5


def serialize_tensor(tensor: Tensor) -> bytes:
    """Header, shape and little-endian data of a tensor on any device; gradients do not travel."""
    tag = TAGS.get(tensor.dtype)
    if tag is None or tensor.layout != torch.strided:
        raise SerializationError(
            "this kind of tensor cannot be serialized",
            hint="send a dense tensor of an ordinary dtype",
            dtype=str(tensor.dtype),
            layout=str(tensor.layout),
        )
    if sys.byteorder != "little":
        raise SerializationError("tensors are sent little-endian, and this machine is not", byteorder=sys.byteorder)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    shape = struct.pack(f"<{plain.dim()}q", *plain.shape)
    data = plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return _HEADER.pack(_MAGIC, _VERSION, tag, plain.dim()) + shape + data


def deserialize_tensor(data: bytes) -> Tensor:
    """The tensor in `data`, on the CPU; length, shape and dtype are checked before any allocation."""
    if len(data) < _HEADER.size:
        raise _bad("it is shorter than a header", length=len(data))
    magic, version, tag, num_dims = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise _bad("it does not start with a tensor header", magic=magic, version=version)
    if tag >= len(DTYPES) or num_dims > _MAX_DIMS:
        raise _bad("its dtype or number of dims is unknown", tag=tag, num_dims=num_dims)
    start = _HEADER.size + 8 * num_dims
    if len(data) < start:
        raise _bad("it ends within its shape", length=len(data))
    shape = struct.unpack_from(f"<{num_dims}q", data, _HEADER.size)
    dtype = DTYPES[tag]
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(data) - start:
        raise _bad("its length does not fit its shape", shape=shape, dtype=str(dtype), data_bytes=len(data) - start)
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data[start:]), dtype=torch.uint8).view(dtype).view(shape)


def serialize(value: Any) -> bytes:
    """A plain value, however nested, as bytes."""
    try:
        packed: bytes = msgpack.packb(_prepare(value, "value"), default=_extend, strict_types=True)
    except RecursionError as error:
        raise SerializationError("the value contains itself, or is nested too deeply") from error
    return packed


def deserialize(data: bytes) -> Any:
    """The value in `data`; raises SerializationError for anything that `serialize` did not make."""
    try:
        value = msgpack.unpackb(
            data,
            ext_hook=_shrink,
            strict_map_key=False,
            max_str_len=len(data),
            max_bin_len=len(data),
            max_array_len=len(data),
            max_map_len=len(data),
            max_ext_len=len(data),
        )
        _refuse_timestamps(value)
        return value
    except SerializationError:
        raise
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise _bad("it was not made by serialize", length=len(data), reason=str(error)) from error


def _refuse_timestamps(value: Any) -> None:
    """MessagePack decodes its own timestamp extension without calling the hook; we never send one."""
    if isinstance(value, msgpack.Timestamp):
        raise _bad("it holds a timestamp")
    if isinstance(value, dict):
        for pair in value.items():
            _refuse_timestamps(list(pair))
    elif isinstance(value, list):
        for part in value:
            _refuse_timestamps(part)


def _prepare(value: Any, path: str) -> Any:
    """Check every part, dict keys included, and wrap what MessagePack does not have."""
    if value is None or isinstance(value, bool | float | str | bytes | complex | Tensor):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else _BigInt(value)
    if isinstance(value, list):
        return [_prepare(part, f"{path}[{index}]") for index, part in enumerate(value)]
    if type(value) is tuple:
        return tuple(_prepare(part, f"{path}[{index}]") for index, part in enumerate(value))
    if isinstance(value, set | frozenset):
        return {_prepare(part, f"{path}{{…}}") for part in value}
    if isinstance(value, dict):
        return {_prepare(key, f"{path} key"): _prepare(part, f"{path}[{key!r}]") for key, part in value.items()}
    raise SerializationError(
        f"{path} cannot be sent: it is a {type(value).__name__}",
        hint="only numbers, text, bytes, lists, tuples, sets, dicts and tensors travel; convert it to those",
        path=path,
    )


class _BigInt:
    """An integer beyond 64 bits, to be sent as an extension."""

    def __init__(self, value: int) -> None:
        self.value = value


def _extend(value: Any) -> msgpack.ExtType:
    if isinstance(value, Tensor):
        return msgpack.ExtType(_EXT_TENSOR, serialize_tensor(value))
    if isinstance(value, tuple):
        return msgpack.ExtType(_EXT_TUPLE, msgpack.packb(list(value), default=_extend, strict_types=True))
    if isinstance(value, set):
        return msgpack.ExtType(_EXT_SET, msgpack.packb(list(value), default=_extend, strict_types=True))
    if isinstance(value, complex):
        return msgpack.ExtType(_EXT_COMPLEX, struct.pack("<dd", value.real, value.imag))
    assert isinstance(value, _BigInt), "_prepare lets nothing else through"
    size = value.value.bit_length() // 8 + 1
    return msgpack.ExtType(_EXT_BIG_INT, value.value.to_bytes(size, "little", signed=True))


def _shrink(code: int, data: bytes) -> Any:
    if code == _EXT_TENSOR:
        return deserialize_tensor(data)
    if code == _EXT_TUPLE:
        return tuple(deserialize(data))
    if code == _EXT_SET:
        return set(deserialize(data))
    if code == _EXT_COMPLEX:
        return complex(*struct.unpack("<dd", data))
    if code == _EXT_BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    raise _bad("it holds an unknown extension", code=code)


def _bad(what: str, **facts: Any) -> SerializationError:
    return SerializationError(f"the bytes are not a message of this version: {what}", **facts)
