"""Some elements of a gradient with their indices, as a vector and as a message.

Payload: count uint32, unit float32, the values as fp16 in multiples of the unit (or as fp32), the indices (`indices`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torsh_distributed.compress.messages.indices import compiled_for, decode_indices, encode_indices, index_layout
from torsh_distributed.errors import CompressionError

_HEADER = struct.Struct("<If")  # number of elements, and the unit of their values
_MAX_ELEMENTS = 2**32 - 1
_FLOAT_MAX = torch.finfo(torch.float32).max


class Sparse(NamedTuple):
    """Some elements of a vector with their indices; all others are 0."""

    indices: Tensor
    """int64, strictly increasing."""
    values: Tensor
    """fp32."""


class SparseVector(NamedTuple):
    """A vector as a sum of sparse ones, such as those that ranks sent: no pass over all elements is needed."""

    terms: tuple[Sparse, ...]
    num_elements: int

    def scaled(self, factor: float) -> SparseVector:
        """This times a factor."""
        return self._replace(terms=tuple(Sparse(indices, values * factor) for indices, values in self.terms))

    def add_to(self, out: Tensor, *, sign: Literal[1, -1] = 1) -> None:
        """Add this to a flat tensor, or subtract it, term by term."""
        for term in self.terms:
            _add_at(out, term, sign=sign)

    def dense(self) -> Tensor:
        """The whole vector."""
        whole = self.terms[0].values.new_zeros(self.num_elements)
        self.add_to(whole)
        return whole

    def write_to(self, parts: Sequence[Tensor]) -> None:
        """Make contiguous fp32 tensors, one after the other, equal to this."""
        ends = list(accumulate(part.numel() for part in parts))
        for part in parts:
            part.zero_()
        for indices, values in self.terms:
            cuts = torch.searchsorted(indices, torch.tensor(ends, device=indices.device)).tolist()
            for part, start, end, stop in zip(parts, [0, *cuts], cuts, ends, strict=False):
                term = Sparse(indices[start:end], values[start:end])
                _add_at(part.view(-1), term, offset=stop - part.numel())


def _add_at(out: Tensor, sparse: Sparse, *, sign: Literal[1, -1] = 1, offset: int = 0) -> None:
    """Add some elements, with indices counted from `offset`, to a contiguous fp32 tensor, or subtract them.

    Only a sign and no other factor: machines differ in rounding a product that is added, once or twice.
    """
    indices, values = sparse
    module = compiled_for(out)
    if module is not None and out.dtype == values.dtype == torch.float32:
        assert out.is_contiguous()
        addresses = out.data_ptr(), indices.data_ptr(), values.data_ptr()
        module.add_at(*addresses, indices.numel(), offset, sign)
    else:
        out.index_add_(0, indices - offset if offset else indices, values, alpha=sign)


Vector = Tensor | SparseVector
"""One dimension, fp32: every element, or some."""


def add_to(out: Tensor, vector: Vector, *, sign: Literal[1, -1] = 1) -> None:
    """Add a vector to a flat tensor, or subtract it."""
    if isinstance(vector, Tensor):
        out.add_(vector, alpha=sign)
    else:
        vector.add_to(out, sign=sign)


def dense(vector: Vector) -> Tensor:
    """Every element of a vector."""
    return vector if isinstance(vector, Tensor) else vector.dense()


def sparse_bytes(num_elements: int, count: int, dtype: torch.dtype) -> int:
    """The size of a message with `count` of `num_elements` elements: header, values, indices."""
    return _HEADER.size + count * dtype.itemsize + index_layout(num_elements, count).num_bytes


def most_sparse_bytes(num_elements: int, most: int, dtype: torch.dtype) -> int:
    """The size of the largest message with at most `most` elements. A full one needs no indices, so it may be less."""
    counts = {min(most, num_elements), max(min(most, num_elements) - 1, 0)}
    return max(sparse_bytes(num_elements, count, dtype) for count in counts)


def encode_sparse(sparse: Sparse, num_elements: int, dtype: torch.dtype) -> Tensor:
    """The message, uint8. Values are fp32, or fp16 in units of a power of two that lets none of them overflow."""
    if num_elements > _MAX_ELEMENTS:
        raise CompressionError(
            "a sparse message can have at most 2**32 - 1 elements",
            hint="split the gradient into smaller buckets",
            num_elements=num_elements,
        )
    values = sparse.values
    unit = torch.ones(1, device=values.device) if dtype == torch.float32 else _unit(values)
    written = (values / unit).to(dtype)
    count = torch.tensor([values.numel()], dtype=torch.int64).to(values.device)
    return torch.cat(
        [
            count.view(torch.uint8)[:4],
            unit.view(torch.uint8),
            written.view(torch.uint8),
            encode_indices(sparse.indices, num_elements),
        ]
    )


def _unit(values: Tensor) -> Tensor:
    """A power of two that brings the largest magnitude to 2**14 … 2**15, from its bits: exact on every device."""
    if values.numel() == 0:
        return torch.ones(1, device=values.device)
    exponent = values.abs().amax().view(1).view(torch.int32) >> 23
    return ((exponent - 14).clamp_(min=1) << 23).view(torch.float32)


def decode_sparse(message: Tensor, num_elements: int, dtype: torch.dtype, *, is_padded: bool = False) -> Sparse:
    """Decode a message; bytes may follow it if `is_padded`. Raises CompressionError if it cannot be a message."""
    if message.dim() != 1 or message.dtype != torch.uint8 or message.numel() < _HEADER.size:
        raise CompressionError(
            "a sparse message is at least a header of bytes", shape=tuple(message.shape), dtype=message.dtype
        )
    count, unit = _HEADER.unpack(bytes(message[: _HEADER.size].tolist()))
    if count > num_elements or not (math.isfinite(unit) and unit > 0):
        raise CompressionError("the header of a sparse message is damaged", count=count, unit=unit, of=num_elements)
    expected = sparse_bytes(num_elements, count, dtype)
    if message.numel() < expected or (message.numel() > expected and not is_padded):
        raise CompressionError(
            f"a sparse message of {count} elements of {num_elements} has {expected} bytes", num_bytes=message.numel()
        )
    values_end = _HEADER.size + count * dtype.itemsize
    # A message cut from a buffer may start at an odd address; the copy does not.
    written = message[_HEADER.size : values_end].clone().view(dtype)
    values = written.float().mul_(unit).clamp_(-_FLOAT_MAX, _FLOAT_MAX)
    return Sparse(decode_indices(message[values_end:expected], num_elements, count), values)


def densify(sparse: Sparse, num_elements: int) -> Tensor:
    """The whole vector."""
    return sparse.values.new_zeros(num_elements).index_copy_(0, sparse.indices, sparse.values)
