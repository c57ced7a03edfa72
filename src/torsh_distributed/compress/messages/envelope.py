"""A payload on its way: a header of 32 bytes, the payload, and zeros up to a multiple of 16.

Header, little-endian: magic "TSHG", version (1 byte), what its sender has to say (1 byte, `Notice`), the rank that the
notice is about (2 bytes), the codec's signature (4), elements (8), bytes of payload (8), checksum of payload and header
(4). What a receiver expects it knows beforehand, so every field is compared: a message that is damaged, or was made by
another codec, for another size or by another version, is refused.
"""

from __future__ import annotations

import enum
import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from torsh_distributed.compress.kernels.choice import kernels_for
from torsh_distributed.errors import CompressionError

_HEADER = struct.Struct("<4sBBHIQQ")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"TSHG"
_VERSION = 1
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_ALIGNMENT = 16


class Notice(enum.IntEnum):
    """What travels beside the payload."""

    NONE = 0
    REFUSED = 1
    """The sender could not decode the message of the rank it names: its payload says nothing, and all must raise."""


class Shape(NamedTuple):
    """What both sides know of a message before it travels."""

    signature: int
    """Codec and parameters, as 32 bits."""
    num_elements: int
    num_bytes: int
    """Of the payload."""

    @property
    def message_bytes(self) -> int:
        """The whole message, as it travels."""
        return HEADER_BYTES + self.num_bytes + -self.num_bytes % _ALIGNMENT

    def payload_of(self, message: Tensor) -> Tensor:
        """The payload's part of a message: a view."""
        return message[HEADER_BYTES : HEADER_BYTES + self.num_bytes]


class Opened(NamedTuple):
    """A message that arrived whole."""

    payload: Tensor
    notice: Notice
    subject: int


def seal(message: Tensor, shape: Shape, *, notice: Notice = Notice.NONE, subject: int = 0) -> None:
    """Put the header before the payload that lies in `message` (uint8, `shape.message_bytes` long)."""
    fields = (_MAGIC, _VERSION, notice, subject, shape.signature, shape.num_elements, shape.num_bytes)
    header = _HEADER.pack(*fields)
    header += _CHECKSUM.pack(_checksum(header, shape.payload_of(message)))
    message[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    message[HEADER_BYTES + shape.num_bytes :].zero_()


def open_message(message: Tensor, shape: Shape) -> Opened:
    """Check a message and take its payload (a view); raises CompressionError where it is not what `shape` says."""
    raw = message[:HEADER_BYTES].cpu().numpy().tobytes()
    magic, version, notice, subject, *described = _HEADER.unpack_from(raw)
    (checksum,) = _CHECKSUM.unpack_from(raw, _HEADER.size)
    if (magic, version) != (_MAGIC, _VERSION):
        raise CompressionError(
            "a message is no compressed gradient of this version", magic=magic.hex(), version=version, expected=_VERSION
        )
    if Shape(*described) != shape:
        raise CompressionError(
            "a message is of another codec or size than expected", got=Shape(*described), expected=shape
        )
    payload = shape.payload_of(message)
    if checksum != _checksum(raw[: _HEADER.size], payload):
        raise CompressionError("a message was damaged on its way: its checksum differs", num_bytes=shape.num_bytes)
    return Opened(payload, Notice(notice), subject)


def _checksum(header: bytes, payload: Tensor) -> int:
    return (zlib.crc32(header) + kernels_for(payload).checksum(payload)) & 0xFFFFFFFF
