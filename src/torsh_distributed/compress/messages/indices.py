"""Sorted indices as bits, close to the entropy of a random set, in a size that depends on the counts alone.

Each index is cut in two: the low bits are written side by side, the high bits as a step function in unary (the code of
Elias and Fano). At a density of 1 % an index takes 8.56 bits; the least possible for a random set is 8.08. A dense set
is a bitmap; the empty and the full set take nothing. Why a fixed size: ranks that know how many elements travel also
know the size of the messages. Bits fill bytes from the lowest up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torsh_distributed.compress.kernels.kernel_choice import compiled_module
from torsh_distributed.errors import CompressionError

_MAX_LOW_BITS = 32
_PROBLEMS = {
    1: "the number of indices differs from the message's count",
    2: "the indices are out of order or out of range",
}


class IndexLayout(NamedTuple):
    """How the indices of a set are written; it depends on `num_elements` and `count` alone."""

    low_bits: int
    """Bits of each index that are written as they are."""

    num_unary_bits: int
    """Length of the unary part; 0 if no index is written."""

    is_bitmap: bool

    num_bytes: int

    def low_bytes(self, count: int) -> int:
        """Bytes of the low bits, before those of the unary part."""
        return _bytes_for(count * self.low_bits)


@lru_cache(maxsize=4096)
def index_layout(num_elements: int, count: int) -> IndexLayout:
    """The shortest layout for `count` of `num_elements` indices."""
    if count in (0, num_elements):
        return IndexLayout(0, 0, False, 0)
    sizes = [_split_bytes(num_elements, count, low) for low in range(_MAX_LOW_BITS + 1)]
    low = min(range(len(sizes)), key=sizes.__getitem__)
    bitmap_bytes = _bytes_for(num_elements)
    if bitmap_bytes <= sizes[low]:
        return IndexLayout(0, num_elements, True, bitmap_bytes)
    return IndexLayout(low, count + (num_elements - 1 >> low), False, sizes[low])


def _split_bytes(num_elements: int, count: int, low: int) -> int:
    return _bytes_for(count * low) + _bytes_for(count + (num_elements - 1 >> low))


def _bytes_for(num_bits: int) -> int:
    return -(-num_bits // 8)


def encode_indices(indices: Tensor, num_elements: int) -> Tensor:
    """The bytes of strictly increasing int64 indices below `num_elements`: `index_layout(...).num_bytes` uint8."""
    count = indices.numel()
    layout = index_layout(num_elements, count)
    if layout.num_bytes == 0:
        return indices.new_empty(0, dtype=torch.uint8)
    module = compiled_for(indices)
    if module is not None:
        packed = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        start = packed.data_ptr()
        places = indices.contiguous()
        low_bits = -1 if layout.is_bitmap else layout.low_bits
        module.indices_encode(places.data_ptr(), count, low_bits, start, start + layout.low_bytes(count))
        return packed
    marks = torch.zeros(layout.num_unary_bits, dtype=torch.uint8, device=indices.device)
    if layout.is_bitmap:
        return pack_bits(marks.index_fill_(0, indices, 1))
    steps = (indices >> layout.low_bits) + torch.arange(count, device=indices.device)
    unary = pack_bits(marks.index_fill_(0, steps, 1))
    return torch.cat([_pack_low(indices, layout.low_bits), unary])


def decode_indices(packed: Tensor, num_elements: int, count: int) -> Tensor:
    """Decode the indices, int64. Raises CompressionError if the bytes do not encode such a set."""
    layout = index_layout(num_elements, count)
    if packed.numel() != layout.num_bytes:
        raise _damaged("the indices have the wrong length for their number", num_elements, count)
    if layout.num_bytes == 0:
        return torch.arange(count, device=packed.device)
    low_bytes = layout.low_bytes(count)
    module = compiled_for(packed)
    if module is not None:
        source = packed.contiguous()
        start = source.data_ptr()
        low_bits = -1 if layout.is_bitmap else layout.low_bits
        indices = torch.empty(count, dtype=torch.int64)
        problem = module.indices_decode(
            start, start + low_bytes, layout.num_unary_bits, count, low_bits, num_elements, indices.data_ptr()
        )
        if problem:
            raise _damaged(_PROBLEMS[problem], num_elements, count)
        return indices
    marks = unpack_bits(packed[low_bytes:], layout.num_unary_bits)
    steps = nonzero(marks)
    if steps.numel() != count:
        raise _damaged(_PROBLEMS[1], num_elements, count)
    if layout.is_bitmap:
        return steps
    high = steps - torch.arange(count, device=packed.device)
    indices = (high << layout.low_bits) + _unpack_low(packed[:low_bytes], layout.low_bits, count)
    if int(indices[-1]) >= num_elements or bool((indices[1:] <= indices[:-1]).any()):
        raise _damaged(_PROBLEMS[2], num_elements, count)
    return indices


def compiled_for(tensor: Tensor) -> Any | None:
    """The compiled module if it can work on this tensor; its results are those of torch's and numpy's operators."""
    # Any: the module has no Python source; its docstrings give the arguments.
    return compiled_module() if tensor.device.type == "cpu" else None


def _damaged(what: str, num_elements: int, count: int) -> CompressionError:
    return CompressionError(what, num_elements=num_elements, count=count)


def _pack_low(indices: Tensor, low_bits: int) -> Tensor:
    """The lowest bits of each index, one after the other."""
    if indices.device.type == "cpu":  # numpy unpacks bytes several times faster than shifts do
        words = indices.numpy().astype("<u4").view(np.uint8).reshape(-1, 4)
        bits = torch.from_numpy(np.unpackbits(words, axis=1, count=low_bits, bitorder="little"))
    else:
        shifts = torch.arange(low_bits, device=indices.device)
        bits = (indices.unsqueeze(1) >> shifts & 1).to(torch.uint8)
    return pack_bits(bits.flatten())


def _unpack_low(packed: Tensor, low_bits: int, count: int) -> Tensor:
    bits = unpack_bits(packed, count * low_bits).view(count, low_bits)
    if packed.device.type == "cpu":
        words = np.zeros((count, 4), np.uint8)
        used = _bytes_for(low_bits)
        words[:, :used] = np.packbits(bits.numpy(), axis=1, bitorder="little")
        return torch.from_numpy(words.view("<u4").ravel().astype(np.int64))
    return (bits.long() << torch.arange(low_bits, device=packed.device)).sum(dim=1)


def pack_bits(bits: Tensor) -> Tensor:
    """Eight zeros or ones (uint8, 1-D) a byte, the first in the lowest bit; the rest of the last byte is 0."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (padded * weights).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first `count` bits as uint8 zeros and ones."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little"))
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(1) >> shifts & 1).flatten()[:count]


def nonzero(mask: Tensor) -> Tensor:
    """Where a 1-D mask is not zero: int64, increasing."""
    if mask.device.type == "cpu":  # six times as fast as torch's on a sparse mask
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(1)
