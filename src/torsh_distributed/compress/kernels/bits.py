"""Bit packing: codes of 1 to 8 bits, and trits, as bytes.

A block of n codes of b bits is written in parts, one for each power of two in b, widest first: b = 7 is a part of 4
bits, one of 2 and one of 1, taking each code's bits from the lowest on. In a part of width w the byte k holds the
fields of elements k, k + s, k + 2s, … where s = ceil(n w / 8) is the number of its bytes; the first is lowest. Elements
past n count as 0. Why not neighbours in a byte: bytes then come from contiguous runs of elements, which a core packs 16
or 32 at a time and a GPU without crossing lanes. Trits (0, +1, -1 as 0, 1, 2) go five to a byte in the same way, as
the digits of a number in base 3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_TRIT_WEIGHTS = (1, 3, 9, 27, 81)
_WIDTHS = (8, 4, 2, 1)


def packed_bytes(num_codes: int, bits: int) -> int:
    """The size of a packed block: exactly b bits a code where `num_codes` is a multiple of 8."""
    return sum(-(-num_codes * width // 8) for width in _WIDTHS if bits & width)


def blocks_packed_bytes(num_elements: int, block: int, bits: int) -> int:
    """The size of all packed blocks of a message; the last block may be short."""
    num_full, rest = divmod(num_elements, block)
    return num_full * packed_bytes(block, bits) + packed_bytes(rest, bits)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes (rows, n) to bytes (rows, packed_bytes(n, bits)); each row is a block."""
    num_rows, num_codes = codes.shape
    parts, shift = [], 0
    for width in _WIDTHS:
        if bits & width:
            stride, lanes = -(-num_codes * width // 8), 8 // width
            fields = codes >> shift & (1 << width) - 1
            laid = pad(fields, (0, stride * lanes - num_codes)).view(num_rows, lanes, stride)
            parts.append((laid << _shifts(width, codes.device)).sum(1, dtype=torch.uint8))
            shift += width
    return torch.cat(parts, dim=1)


def unpack(packed: Tensor, num_codes: int, bits: int) -> Tensor:
    """What `pack` packed: uint8 codes (rows, num_codes)."""
    num_rows = packed.shape[0]
    codes = packed.new_zeros(num_rows, num_codes)
    start, shift = 0, 0
    for width in _WIDTHS:
        if bits & width:
            stride = -(-num_codes * width // 8)
            part = packed[:, start : start + stride].unsqueeze(1)
            fields = part >> _shifts(width, packed.device) & (1 << width) - 1
            codes |= fields.reshape(num_rows, -1)[:, :num_codes] << shift
            start, shift = start + stride, shift + width
    return codes


def trit_bytes(num_trits: int) -> int:
    """The size of a block of trits."""
    return -(-num_trits // 5)


def pack_trits(trits: Tensor) -> Tensor:
    """uint8 trits (rows, n) to bytes (rows, trit_bytes(n))."""
    num_rows, num_trits = trits.shape
    stride = trit_bytes(num_trits)
    laid = pad(trits, (0, 5 * stride - num_trits)).view(num_rows, 5, stride)
    return (laid * _trit_weights(trits.device)).sum(1, dtype=torch.uint8)


def unpack_trits(packed: Tensor, num_trits: int) -> Tensor:
    """What `pack_trits` packed: uint8 trits (rows, num_trits)."""
    digits = packed.unsqueeze(1).div(_trit_weights(packed.device), rounding_mode="floor") % 3
    return digits.reshape(packed.shape[0], -1)[:, :num_trits]


def _shifts(width: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device).view(1, -1, 1)


def _trit_weights(device: torch.device) -> Tensor:
    return torch.tensor(_TRIT_WEIGHTS, dtype=torch.uint8, device=device).view(1, -1, 1)
