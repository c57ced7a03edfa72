"""CompressedGradient: a message compressed by hand; and the checks that every gradient passes.

The envelope of a payload: a header of 32 bytes before it, and zeros up to a multiple of 16 after it.
Header, little-endian: magic "TSHG", version (1 byte), 3 reserved, the codec's signature (4), elements (8), bytes of
payload (8), checksum of payload and header (4). A receiver knows beforehand what it expects, so every field is
compared: a message that is damaged, or was made by another codec, for another size or by another version, is refused.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torsh_distributed.compress.kernels.kernel_choice import kernels_for
from torsh_distributed.compress.messages.sparse import Vector
from torsh_distributed.errors import CompressionError, InvalidArgument

_HEADER = struct.Struct("<4sB3xIQQ")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"TSHG"
_VERSION = 1
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_ALIGNMENT = 16


class MessageSpec(NamedTuple):
    """What both sides know of a message before it travels."""

    signature: int
    """Codec and parameters, as 32 bits."""
    num_elements: int
    num_bytes: int
    """Of the payload."""

    @property
    def message_bytes(self) -> int:
        """The size of the whole message: header, payload and padding."""
        return HEADER_BYTES + self.num_bytes + -self.num_bytes % _ALIGNMENT

    def payload_of(self, message: Tensor) -> Tensor:
        """The payload's part of a message: a view."""
        return message[HEADER_BYTES : HEADER_BYTES + self.num_bytes]


def seal(message: Tensor, spec: MessageSpec) -> None:
    """Write header and padding around the payload that lies in `message` (uint8, `spec.message_bytes` long)."""
    header = _HEADER.pack(_MAGIC, _VERSION, *spec)
    header += _CHECKSUM.pack(_checksum(header, spec.payload_of(message)))
    message[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    message[HEADER_BYTES + spec.num_bytes :].zero_()


def open_message(message: Tensor, spec: MessageSpec) -> Tensor:
    """Check a message and return its payload (a view); raises CompressionError if it is not what `spec` says."""
    raw = message[:HEADER_BYTES].cpu().numpy().tobytes()
    magic, version, *described = _HEADER.unpack_from(raw)
    (checksum,) = _CHECKSUM.unpack_from(raw, _HEADER.size)
    if (magic, version) != (_MAGIC, _VERSION):
        raise CompressionError(
            "a message is not a compressed gradient of this version",
            magic=magic.hex(),
            version=version,
            expected=_VERSION,
        )
    if MessageSpec(*described) != spec:
        raise CompressionError(
            "a message is of another codec or size than expected", got=MessageSpec(*described), expected=spec
        )
    payload = spec.payload_of(message)
    if checksum != _checksum(raw[: _HEADER.size], payload):
        raise CompressionError("a message was damaged on its way: its checksum differs", num_bytes=spec.num_bytes)
    return payload


def _checksum(header: bytes, payload: Tensor) -> int:
    return (zlib.crc32(header) + kernels_for(payload).checksum(payload)) & 0xFFFFFFFF


DENSE = "none"
"""The method of a message that is the tensor itself."""


@dataclass(frozen=True, kw_only=True)
class CompressedGradient:
    """A compressed tensor: everything that `decompress` needs."""

    method: str
    data: Tensor
    """The payload; for method `none` the values themselves, flat."""

    original_shape: tuple[int, ...]
    dtype: torch.dtype
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """`name`; `key` (seed, step, stream, rank) for the codec; `ratio`, `error_norm` and `original_norm` as measured;
    `is_difference` where the message builds on the ones before."""

    @property
    def num_bytes(self) -> int:
        """Bytes of payload."""
        return num_bytes(self.data)


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's values."""
    return tensor.numel() * tensor.element_size()


def is_finite(x: Vector) -> bool:
    """Whether no element is NaN or infinite. One quick pass in the good case: NaN and infinity show in the sum."""
    if not isinstance(x, Tensor):
        return all(is_finite(term.values) for term in x.terms)
    return bool(x.sum(dtype=torch.float32).isfinite()) or bool(x.isfinite().all())


def norm(x: Tensor) -> float:
    """The Euclidean length of a tensor."""
    return float(torch.linalg.vector_norm(x))


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise InvalidArgument unless the gradient is a dense tensor of floating-point numbers."""
    if tensor.layout != torch.strided:
        raise InvalidArgument(
            f"the gradient of {name} is sparse: compression takes dense gradients",
            hint="make it dense (nn.Embedding(sparse=False)), or train this model without compression",
            name=name,
            layout=str(tensor.layout),
        )
    if not tensor.is_floating_point():
        raise InvalidArgument(
            f"the gradient of {name} is not a floating-point tensor",
            hint="train a complex parameter as torch.view_as_real of it",
            name=name,
            dtype=str(tensor.dtype),
        )
