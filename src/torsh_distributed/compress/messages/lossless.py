"""Bytes in fewer bytes, and back exactly: for objects and training state on the wire, not for gradients.

Gradients are noise to such a coder; parameters and optimizer state shrink a little, text and indices a lot. The coder
is zstd where it is installed (the extra `[zstd]`) and zlib, which Python has, where it is not.

Frame, little-endian: magic "TSHZ", version (1 byte), coder (1), bytes of an element (1), 1 reserved, bytes before (8),
crc32 of them (4). What would not shrink is stored as it is: a frame is at most 20 bytes longer than its content.
"""

from __future__ import annotations

import enum
import importlib.util
import struct
import zlib
from typing import Any

import numpy as np
import torch.distributed as dist
from typing_extensions import Unpack

from torsh_distributed.comm.collectives.call import CallOptions
from torsh_distributed.comm.collectives.objects import broadcast_object
from torsh_distributed.comm.serialization import deserialize, serialize
from torsh_distributed.errors import CompressionError, FeatureNotAvailable, InvalidArgument

_HEADER = struct.Struct("<4sBBBxQI")
_MAGIC = b"TSHZ"
_VERSION = 1
_ZSTD_LEVEL = 3
_ZLIB_LEVEL = 1  # the higher ones take several times as long for a few percent


class Coder(enum.IntEnum):
    """How the content of a frame is written; numbers are part of the wire format."""

    STORED = 0
    ZLIB = 1
    ZSTD = 2


def is_zstd_available() -> bool:
    """Whether the package `zstandard` is installed."""
    return importlib.util.find_spec("zstandard") is not None


def compress_bytes(data: bytes, *, element_bytes: int = 1, coder: Coder | None = None) -> bytes:
    """A frame with `data` in it; without a `coder` the best that is installed.

    `element_bytes` is the size of the numbers that `data` is made of, 4 for fp32: their first bytes are then written
    together, their second ones, and so on. Exponents repeat and mantissas do not, so each kind is better off alone.
    """
    if not 1 <= element_bytes <= 255:
        raise InvalidArgument("an element has 1 to 255 bytes", element_bytes=element_bytes)
    chosen = coder if coder is not None else Coder.ZSTD if is_zstd_available() else Coder.ZLIB
    content = _encode(_apart(data, element_bytes), chosen)
    if len(content) >= len(data):
        chosen, element_bytes, content = Coder.STORED, 1, data
    return _HEADER.pack(_MAGIC, _VERSION, chosen, element_bytes, len(data), zlib.crc32(data)) + content


def decompress_bytes(frame: bytes, *, most_bytes: int = 2**32) -> bytes:
    """What is in a frame; raises CompressionError where it is damaged, or says it holds more than `most_bytes`.

    No more memory is taken than the header says, whatever follows it.
    """
    if len(frame) < _HEADER.size:
        raise CompressionError("a frame is at least a header", num_bytes=len(frame), header_bytes=_HEADER.size)
    magic, version, kind, element_bytes, size, checksum = _HEADER.unpack_from(frame)
    if magic != _MAGIC or version != _VERSION or kind not in tuple(Coder) or element_bytes == 0:
        raise CompressionError(
            "this is no frame of compressed bytes of this version", magic=magic.hex(), version=version
        )
    if size > most_bytes:
        raise CompressionError(
            "a frame holds more than is allowed",
            hint="raise most_bytes if that is expected",
            size=size,
            most=most_bytes,
        )
    content = _decode(frame[_HEADER.size :], Coder(kind), size)
    data = _together(content, element_bytes) if len(content) == size else b""
    if len(data) != size or zlib.crc32(data) != checksum:
        raise CompressionError("a frame was damaged on its way", num_bytes=len(content), expected=size)
    return data


def broadcast_compressed(value: Any, src: int, *, element_bytes: int = 1, **where: Unpack[CallOptions]) -> Any:
    """The value that rank `src` gives, on every rank: as `broadcast_object`, in fewer bytes."""
    frame = compress_bytes(serialize(value), element_bytes=element_bytes) if dist.get_rank() == src else b""
    return deserialize(decompress_bytes(broadcast_object(frame, src, **where)))


def _apart(data: bytes, element_bytes: int) -> bytes:
    """First bytes of all elements, second bytes, …; what is left over at the end stays there."""
    whole = len(data) - len(data) % element_bytes
    if element_bytes == 1 or whole == 0:
        return data
    return np.frombuffer(data[:whole], np.uint8).reshape(-1, element_bytes).T.tobytes() + data[whole:]


def _together(data: bytes, element_bytes: int) -> bytes:
    whole = len(data) - len(data) % element_bytes
    if element_bytes == 1 or whole == 0:
        return data
    return np.frombuffer(data[:whole], np.uint8).reshape(element_bytes, -1).T.tobytes() + data[whole:]


def _encode(data: bytes, coder: Coder) -> bytes:
    if coder is Coder.ZSTD:
        return bytes(_zstd().ZstdCompressor(level=_ZSTD_LEVEL).compress(data))
    return zlib.compress(data, _ZLIB_LEVEL) if coder is Coder.ZLIB else data


def _decode(content: bytes, coder: Coder, size: int) -> bytes:
    """The content, or some other number of bytes than `size`, and at most one more, where it cannot be that."""
    if coder is Coder.ZSTD:
        zstd = _zstd()
        try:
            return bytes(zstd.ZstdDecompressor().stream_reader(content).read(size + 1))
        except zstd.ZstdError as error:
            raise CompressionError("a frame was damaged on its way", reason=str(error)) from error
    if coder is Coder.ZLIB:
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(content, size + 1)
        except zlib.error as error:
            raise CompressionError("a frame was damaged on its way", reason=str(error)) from error
        return data if stream.eof else b""
    return content


def _zstd() -> Any:
    """The module, or an error that says how to get it."""
    if not is_zstd_available():
        raise FeatureNotAvailable(
            "zstd needs the package zstandard",
            hint='pip install "torsh-distributed[zstd]" on every node, or send with coder=Coder.ZLIB',
        )
    import zstandard

    return zstandard
