"""The check that every decoder makes before it reads a payload."""

from __future__ import annotations

from torch import Tensor

from torsh_distributed.compress.codecs.base import Codec
from torsh_distributed.errors import CompressionError


def require_payload(codec: Codec, payload: Tensor, num_elements: int) -> None:
    """Raise CompressionError unless `payload` has the size that `codec` gives a message of `num_elements`."""
    expected, got = codec.payload_bytes(num_elements), payload.numel() * payload.element_size()
    if payload.dim() != 1 or (expected is not None and got != expected):
        raise CompressionError(
            f"a {codec.name} message of {num_elements} elements has {expected} bytes",
            num_bytes=got,
            shape=tuple(payload.shape),
            dtype=payload.dtype,
        )
