"""The kernels with torch's operators: for any device, and where the C was not compiled.

Each works on the full blocks as one matrix (blocks, elements), then on the short last block as a matrix of one row. The
operations and their order are those of the C in `native/`: products and sums are rounded one by one, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from torsh_distributed.compress.kernels import bits as bitwise
from torsh_distributed.compress.kernels.base import NUM_BINS, TINY, Histogram, Kernels
from torsh_distributed.compress.kernels.noise import checksum, noise, uniform

_MANTISSA = 0x7FFFFF


class _BlockRows(NamedTuple):
    """Blocks of one length: `num_blocks` of them, from block `block` on, starting at element `start`."""

    block: int
    num_blocks: int
    start: int
    length: int

    def of(self, x: Tensor) -> Tensor:
        """The blocks' part of a tensor with one entry for each element, as a matrix."""
        return x[self.start : self.start + self.num_blocks * self.length].view(self.num_blocks, self.length)

    def uniform(self, key: int, offset: int, device: torch.device) -> Tensor:
        """A number from [0, 1) for each element, as a matrix."""
        drawn = uniform(key, offset + self.start, self.num_blocks * self.length, device)
        return drawn.view(self.num_blocks, self.length)

    def noise(self, key: int, offset: int, device: torch.device) -> Tensor:
        """32 random bits for each element, as a matrix."""
        drawn = noise(key, offset + self.start, self.num_blocks * self.length, device)
        return drawn.view(self.num_blocks, self.length)


def _rows(num_elements: int, block: int) -> Iterator[_BlockRows]:
    num_full, rest = divmod(num_elements, block)
    if num_full:
        yield _BlockRows(0, num_full, 0, block)
    if rest:
        yield _BlockRows(num_full, 1, num_full * block, rest)


class _Sections:
    """A payload: a head for each block, then the blocks' bodies, one after the other."""

    def __init__(self, payload: Tensor, num_elements: int, block: int, head_bytes: int) -> None:
        self._payload = payload
        self._head_bytes = head_bytes
        self._at = -(-num_elements // block) * head_bytes

    def head(self, rows: _BlockRows) -> Tensor:
        """(blocks, head bytes)"""
        start, size = rows.block * self._head_bytes, rows.num_blocks * self._head_bytes
        return self._payload[start : start + size].view(rows.num_blocks, self._head_bytes)

    def floats(self, rows: _BlockRows) -> Tensor:
        """A copy of the heads as fp32: (blocks, floats in a head)."""
        return self.head(rows).clone().view(torch.float32)

    def body(self, rows: _BlockRows, row_bytes: int) -> Tensor:
        """(blocks, row_bytes); call once for each part, in order."""
        start = self._at
        self._at += rows.num_blocks * row_bytes
        return self._payload[start : self._at].view(rows.num_blocks, row_bytes)

    def write(self, rows: _BlockRows, floats: Tensor, body: Tensor) -> None:
        """Heads (blocks, floats in a head), fp32, and bodies (blocks, bytes), uint8."""
        self.head(rows).copy_(floats.contiguous().view(torch.uint8))
        self.body(rows, body.shape[1]).copy_(body)


class TorchKernels(Kernels):
    """The arithmetic as a sequence of torch's operators."""

    @override
    def checksum(self, payload: Tensor) -> int:
        words = pad(payload, (0, -payload.numel() % 4)).clone() if payload.numel() else payload
        return checksum(words.view(torch.int32))

    @override
    def int8_encode(self, x: Tensor, block: int, out: Tensor) -> None:
        sections = _Sections(out, x.numel(), block, 4)
        for rows in _rows(x.numel(), block):
            values = rows.of(x)
            largest = values.abs().amax(1, keepdim=True)
            is_zero = largest < TINY
            inverse = _quotient(127.0, largest).masked_fill(is_zero, 0.0)
            codes = (values * inverse).round().to(torch.int8).view(torch.uint8)
            sections.write(rows, _quotient(largest, 127.0).masked_fill(is_zero, 0.0), codes)

    @override
    def int8_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        sections, is_sound = _Sections(payload, out.numel(), block, 4), True
        for rows in _rows(out.numel(), block):
            scales = sections.floats(rows)
            is_sound &= _are_scales(scales)
            codes = sections.body(rows, rows.length).view(torch.int8)
            _emit(rows.of(out), codes.float() * (scales * weight), adds)
        return is_sound

    @override
    def nbit_encode(self, x: Tensor, block: int, bits: int, key: int, offset: int, out: Tensor) -> None:
        sections, levels = _Sections(out, x.numel(), block, 8), float(2**bits - 1)
        for rows in _rows(x.numel(), block):
            values = rows.of(x)
            low, high = (edge * 0.5 for edge in torch.aminmax(values, dim=1, keepdim=True))
            middle, reach = (high + low) + 0.0, high - low
            is_flat = reach < TINY
            inverse = _quotient(levels * 0.5, reach).masked_fill(is_flat, 0.0)
            drawn = rows.uniform(key, offset, x.device)
            codes = ((values - middle) * inverse + levels * 0.5 + drawn).to(torch.int32)
            packed = bitwise.pack(codes.clamp_(max=2**bits - 1).to(torch.uint8), bits)
            step = _quotient(reach, levels).masked_fill(is_flat, 0.0)
            sections.write(rows, torch.cat([middle, step], dim=1), packed)

    @override
    def nbit_decode(self, payload: Tensor, block: int, bits: int, out: Tensor, weight: float, adds: bool) -> bool:
        sections, is_sound = _Sections(payload, out.numel(), block, 8), True
        for rows in _rows(out.numel(), block):
            heads = sections.floats(rows)
            middle, step = heads[:, :1], heads[:, 1:]
            is_sound &= _are_scales(step) and bool(middle.isfinite().all())
            packed = sections.body(rows, bitwise.packed_bytes(rows.length, bits))
            codes = bitwise.unpack(packed, rows.length, bits).to(torch.int32)
            _emit(rows.of(out), (2 * codes - (2**bits - 1)).float() * (step * weight) + middle * weight, adds)
        return is_sound

    @override
    def sign_encode(self, x: Tensor, block: int, out: Tensor) -> None:
        sections = _Sections(out, x.numel(), block, 4)
        for rows in _rows(x.numel(), block):
            values = rows.of(x)
            count = torch.full((rows.num_blocks, 1), float(rows.length), device=x.device)
            packed = bitwise.pack(values.signbit().to(torch.uint8), 1)
            sections.write(rows, _mean(values.abs(), count, block), packed)

    @override
    def sign_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        sections, is_sound = _Sections(payload, out.numel(), block, 4), True
        for rows in _rows(out.numel(), block):
            scales = sections.floats(rows)
            is_sound &= _are_scales(scales)
            packed = sections.body(rows, bitwise.packed_bytes(rows.length, 1))
            is_negative = bitwise.unpack(packed, rows.length, 1).bool()
            weighted = scales * weight
            _emit(rows.of(out), torch.where(is_negative, -weighted, weighted), adds)
        return is_sound

    @override
    def ternary_encode(self, x: Tensor, block: int, threshold: float, out: Tensor) -> None:
        sections = _Sections(out, x.numel(), block, 4)
        for rows in _rows(x.numel(), block):
            values = rows.of(x)
            magnitudes = values.abs()
            largest = magnitudes.amax(1, keepdim=True)
            least = (largest * threshold).clamp_(min=TINY).masked_fill_(largest < TINY, 1.0)
            is_kept = magnitudes >= least
            count = is_kept.sum(1, keepdim=True, dtype=torch.int32).float()
            scales = torch.where(largest.isfinite(), _mean(magnitudes * is_kept, count, block), largest)
            sections.write(rows, scales, bitwise.pack_trits(_trits(values, is_kept)))

    @override
    def ternary_draw(self, x: Tensor, block: int, key: int, offset: int, out: Tensor) -> None:
        sections = _Sections(out, x.numel(), block, 4)
        for rows in _rows(x.numel(), block):
            values = rows.of(x)
            magnitudes = values.abs()
            largest = magnitudes.amax(1, keepdim=True)
            is_zero = largest < TINY
            chance = magnitudes * _quotient(1.0, largest).masked_fill(is_zero, 0.0)
            drawn = rows.uniform(key, offset, x.device)
            packed = bitwise.pack_trits(_trits(values, chance > drawn))
            sections.write(rows, largest.masked_fill(is_zero, 0.0), packed)

    @override
    def ternary_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        sections, is_sound = _Sections(payload, out.numel(), block, 4), True
        for rows in _rows(out.numel(), block):
            scales = sections.floats(rows)
            packed = sections.body(rows, bitwise.trit_bytes(rows.length))
            is_sound &= _are_scales(scales) and bool((packed <= 242).all())
            trits = bitwise.unpack_trits(packed, rows.length).to(torch.int32)
            _emit(rows.of(out), ((trits & 1) - (trits >> 1)).float() * (scales * weight), adds)
        return is_sound

    @override
    def natural_encode(self, x: Tensor, block: int, key: int, offset: int, out: Tensor) -> None:
        sections = _Sections(out, x.numel(), block, 1)
        for rows in _rows(x.numel(), block):
            bits = rows.of(x).view(torch.int32)
            drawn = rows.noise(key, offset, x.device) & _MANTISSA
            exponents = ((bits & 0x7FFFFFFF) + drawn >> 23).clamp_(max=254)
            reference = exponents.amax(1, keepdim=True)
            codes = (exponents - reference + 127).clamp_(min=0) * (exponents > 0)
            codes = codes | (bits < 0).int() << 7
            is_finite = rows.of(x).isfinite().all(1, keepdim=True)
            sections.head(rows).copy_(reference.masked_fill_(~is_finite, 255))
            sections.body(rows, rows.length).copy_(codes)

    @override
    def natural_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        sections, is_sound = _Sections(payload, out.numel(), block, 1), True
        for rows in _rows(out.numel(), block):
            reference = sections.head(rows).to(torch.int32)
            is_sound &= bool((reference <= 254).all())
            codes = sections.body(rows, rows.length).to(torch.int32)
            magnitude = codes & 127
            exponents = (magnitude + reference - 127).clamp_(min=0) * (magnitude > 0)
            values = (exponents << 23 | codes >> 7 << 31).view(torch.float32)
            _emit(rows.of(out), values * weight, adds)
        return is_sound

    @override
    def histogram(self, x: Tensor) -> Histogram:
        bits = x.view(torch.int32)
        largest = int((bits & 0x7FFFFFFF).amax()) >> 19
        bins, mantissas = _bins(bits, largest), ((bits & _MANTISSA) | _MANTISSA + 1).long()
        empty = torch.zeros(NUM_BINS, dtype=torch.int64, device=x.device)
        counts = empty.index_add(0, bins, torch.ones_like(mantissas))
        return Histogram(largest, counts.cpu(), empty.index_add(0, bins, mantissas).cpu())

    @override
    def codebook_encode(self, x: Tensor, block: int, largest: int, entries: Tensor, bits: int, out: Tensor) -> None:
        codes = entries.to(x.device)[_bins(x.view(torch.int32), largest)]
        sections = _Sections(out, x.numel(), block, 0)
        for rows in _rows(x.numel(), block):
            packed = bitwise.pack(rows.of(codes), bits)
            sections.body(rows, packed.shape[1]).copy_(packed)

    @override
    def codebook_decode(
        self, payload: Tensor, block: int, codebook: Tensor, out: Tensor, weight: float, adds: bool
    ) -> bool:
        bits = max(1, (codebook.numel() - 1).bit_length())
        values = pad(codebook * weight, (0, 2**bits - codebook.numel())).to(out.device)
        sections, is_sound = _Sections(payload, out.numel(), block, 0), bool(codebook.isfinite().all())
        for rows in _rows(out.numel(), block):
            packed = sections.body(rows, bitwise.packed_bytes(rows.length, bits))
            codes = bitwise.unpack(packed, rows.length, bits).long()
            is_sound &= bool((codes < codebook.numel()).all())
            _emit(rows.of(out), values[codes], adds)
        return is_sound


def _quotient(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a / b, rounded once. With a number on one side torch multiplies by a rounded inverse on some devices."""
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    numerator, denominator = (part if isinstance(part, Tensor) else torch.full_like(like, part) for part in (a, b))
    return numerator / denominator


def _emit(out: Tensor, values: Tensor, adds: bool) -> None:
    if adds:
        out.add_(values)
    else:
        out.copy_(values)


def _are_scales(scales: Tensor) -> bool:
    """Finite, and not negative."""
    return bool((scales.isfinite() & ~scales.signbit()).all())


def _mean(magnitudes: Tensor, count: Tensor, block: int) -> Tensor:
    """The sum of each row over its `count`, summed by halves; elements are divided first, so no sum overflows."""
    room = 1 << (block - 1).bit_length()
    parts = pad(magnitudes * (1.0 / room), (0, room - magnitudes.shape[1]))
    while parts.shape[1] > 1:
        half = parts.shape[1] // 2
        parts = parts[:, :half] + parts[:, half:]
    mean = parts * _quotient(float(room), count)
    return mean.masked_fill_((count == 0) | (mean < TINY), 0.0)


def _trits(values: Tensor, is_kept: Tensor) -> Tensor:
    return is_kept.to(torch.uint8) + (is_kept & values.signbit()).to(torch.uint8)


def _bins(bits: Tensor, largest: int) -> Tensor:
    """The bin of each float, given as int32; see `Histogram`."""
    rank = (bits & 0x7FFFFFFF) >> 19
    bins = rank - (largest - 511)
    bins = bins.masked_fill_((bins < 0) | (rank < 16), 0)
    return (bins + (bits < 0).int() * 512).long()
