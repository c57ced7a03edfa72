"""CompressedGradient: a message compressed by hand; and the checks that every gradient passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.compress.messages.sparse import Vector
from torsh_distributed.errors import InvalidArgument

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
