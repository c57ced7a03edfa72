"""The kernels for CUDA: each message in one pass over the tensor, where torch's operators need many.

A program takes whole blocks, a few at a time; the short last block of a message is a start of its own. Products and
sums are rounded one by one (`enable_fp_fusion=False`) and divisions exactly, so that the bytes are those of the C in
`native/`. What has no kernel here goes through torch's operators.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, type-arg"
# Functions under @triton.jit are written in Triton's language, which looks like Python and has other types.

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.kernels.base import TINY
from torsh_distributed.compress.kernels.noise import first_bits
from torsh_distributed.compress.kernels.torch_kernels import TorchKernels
from torsh_distributed.compress.messages.bits import packed_bytes, trit_bytes

_TINY = tl.constexpr(TINY)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to the nearest integer, ties to even
_PROGRAM_ELEMENTS = 4096
_MAX_BLOCK = 8192  # larger ones do not fit the registers of a program


@triton.jit
def _mixed(bits):
    """`noise.mixed`, on uint32."""
    bits = (bits ^ (bits >> 16)) * tl.full([], 0x21F0AAAD, tl.uint32)
    bits = (bits ^ (bits >> 15)) * tl.full([], 0x735A2D97, tl.uint32)
    return bits ^ (bits >> 15)


@triton.jit
def _noise(first, at):
    """32 random bits for the elements at those indices; `first` is what element 0 starts from."""
    index = at.to(tl.uint32)
    return _mixed(index * tl.full([], 0x9E3779B9, tl.uint32) + first.to(tl.uint32))


@triton.jit
def _uniform(first, at):
    return (_noise(first, at) >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _is_negative(values):
    return values.to(tl.int32, bitcast=True) < 0


@triton.jit
def _rows(num_blocks, block, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The blocks of this program: their numbers, where their elements lie, and which of those exist."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    at = rows.to(tl.int64)[:, None] * block + columns[None, :]
    return rows, at, (rows < num_blocks)[:, None] & (columns < block)[None, :]


@triton.jit
def _bytes(num_blocks, block, stride, ROWS: tl.constexpr, STRIDE: tl.constexpr):
    """As `_rows`, for blocks packed in lanes: byte k of a block holds its elements k, k + stride, k + 2 stride, …

    Returns the blocks' numbers, where their bytes lie and which exist, and where the elements of lane 0 lie.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, STRIDE)
    mask = (rows < num_blocks)[:, None] & (columns < stride)[None, :]
    wide = rows.to(tl.int64)[:, None]
    return rows, wide * stride + columns[None, :], mask, wide * block + columns[None, :]


@triton.jit
def _mean(sums, count, room, ROWS: tl.constexpr, STRIDE: tl.constexpr, LEVELS: tl.constexpr):
    """The end of `torch_kernels._mean`: `sums` are those of the lanes, added up by halves from there on."""
    for level in tl.static_range(LEVELS):
        sums = tl.sum(tl.reshape(sums, [ROWS, 2, STRIDE >> (level + 1)]), axis=1)
    mean = tl.reshape(sums, [ROWS]) * tl.div_rn(tl.zeros([ROWS], tl.float32) + room, count)
    return tl.where((count == 0) | (mean < _TINY), 0.0, mean)


@triton.jit
def _check_scales(scales, damage):
    """Leave a mark if a scale is negative or not finite."""
    bits = scales.to(tl.int32, bitcast=True)
    is_bad = (bits < 0) | ((bits & 0x7F800000) == 0x7F800000)
    tl.store(damage, 1, mask=tl.max(is_bad.to(tl.int32), axis=0) > 0)


@triton.jit
def _emit(out, at, values, mask, ADDS: tl.constexpr):
    if ADDS:
        values = tl.load(out + at, mask=mask, other=0.0) + values
    tl.store(out + at, values, mask=mask)


@triton.jit
def _int8_encode(x, scales, codes, num_blocks, block, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rows, at, mask = _rows(num_blocks, block, ROWS, WIDTH)
    values = tl.load(x + at, mask=mask, other=0.0)
    largest = tl.max(tl.abs(values), axis=1)
    is_zero = largest < _TINY
    most = tl.full([ROWS], 127.0, tl.float32)
    inverse = tl.where(is_zero, 0.0, tl.div_rn(most, largest))
    rounded = (values * inverse[:, None] + _ROUNDER) - _ROUNDER
    tl.store(scales + rows, tl.where(is_zero, 0.0, tl.div_rn(largest, most)), mask=rows < num_blocks)
    tl.store(codes + at, rounded.to(tl.int8), mask=mask)


@triton.jit
def _int8_decode(
    scales, codes, out, damage, weight, num_blocks, block, ADDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    rows, at, mask = _rows(num_blocks, block, ROWS, WIDTH)
    scale = tl.load(scales + rows, mask=rows < num_blocks, other=0.0)
    _check_scales(scale, damage)
    code = tl.load(codes + at, mask=mask, other=0)
    _emit(out, at, code.to(tl.float32) * (scale * weight)[:, None], mask, ADDS)


@triton.jit
def _sign_encode(
    x, scales, packed, num_blocks, block, stride, room, ROWS: tl.constexpr, STRIDE: tl.constexpr, LEVELS: tl.constexpr
):
    rows, bytes_at, mask, at = _bytes(num_blocks, block, stride, ROWS, STRIDE)
    share = 1.0 / room
    a = tl.load(x + at, mask=mask, other=0.0)
    b = tl.load(x + at + stride, mask=mask, other=0.0)
    c = tl.load(x + at + 2 * stride, mask=mask, other=0.0)
    d = tl.load(x + at + 3 * stride, mask=mask, other=0.0)
    e = tl.load(x + at + 4 * stride, mask=mask, other=0.0)
    f = tl.load(x + at + 5 * stride, mask=mask, other=0.0)
    g = tl.load(x + at + 6 * stride, mask=mask, other=0.0)
    h = tl.load(x + at + 7 * stride, mask=mask, other=0.0)
    # By halves: lane 0 with lane 4, their sum with that of lanes 2 and 6, and so on.
    even = (tl.abs(a) * share + tl.abs(e) * share) + (tl.abs(c) * share + tl.abs(g) * share)
    odd = (tl.abs(b) * share + tl.abs(f) * share) + (tl.abs(d) * share + tl.abs(h) * share)
    mean = _mean(even + odd, tl.zeros([ROWS], tl.float32) + block, room, ROWS, STRIDE, LEVELS)
    byte = _sign_bit(a, 0) | _sign_bit(b, 1) | _sign_bit(c, 2) | _sign_bit(d, 3)
    byte = byte | _sign_bit(e, 4) | _sign_bit(f, 5) | _sign_bit(g, 6) | _sign_bit(h, 7)
    tl.store(scales + rows, mean, mask=rows < num_blocks)
    tl.store(packed + bytes_at, byte.to(tl.uint8), mask=mask)


@triton.jit
def _sign_encode_short(
    x, scales, packed, block, stride, room, STRIDE: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr
):
    """One block whose lanes are not those that are added up."""
    flat = tl.arange(0, WIDTH)[None, :]
    magnitudes = tl.abs(tl.load(x + flat, mask=flat < block, other=0.0))
    mean = _mean(magnitudes * (1.0 / room), tl.zeros([1], tl.float32) + block, room, 1, WIDTH, LEVELS)
    tl.store(scales + tl.arange(0, 1), mean)
    columns = tl.arange(0, STRIDE)
    byte = tl.zeros([STRIDE], tl.int32)
    for lane in tl.static_range(8):
        at = columns + lane * stride
        byte = byte | _sign_bit(tl.load(x + at, mask=at < block, other=0.0), lane)
    tl.store(packed + columns, byte.to(tl.uint8), mask=columns < stride)


@triton.jit
def _sign_bit(values, BIT: tl.constexpr):
    return _is_negative(values).to(tl.int32) << BIT


@triton.jit
def _sign_decode(
    scales, packed, out, damage, weight, num_blocks, block, stride,
    ADDS: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    rows, bytes_at, mask, at = _bytes(num_blocks, block, stride, ROWS, STRIDE)
    scale = tl.load(scales + rows, mask=rows < num_blocks, other=0.0)
    _check_scales(scale, damage)
    byte = tl.load(packed + bytes_at, mask=mask, other=0).to(tl.int32)
    worth, columns = (scale * weight)[:, None], tl.arange(0, STRIDE)[None, :]
    for lane in tl.static_range(8):
        # Not -worth, which Triton makes 0 - worth: -0.0 would be lost.
        values = tl.where(((byte >> lane) & 1) == 1, worth * -1.0, worth)
        _emit(out, at + lane * stride, values, mask & (columns + lane * stride < block), ADDS)


@triton.jit
def _trit(values, limit, at, first, DRAWS: tl.constexpr):
    """0, 1 for plus, 2 for minus."""
    is_kept = tl.abs(values) * limit > _uniform(first, at) if DRAWS else tl.abs(values) >= limit
    return is_kept.to(tl.int32) + (is_kept & _is_negative(values)).to(tl.int32)


@triton.jit
def _kept(values, limit):
    return tl.where(tl.abs(values) >= limit, tl.abs(values), 0.0)


@triton.jit(do_not_specialize=["first"])
def _ternary_encode(
    x, scales, packed, num_blocks, block, stride, room, threshold, first,
    DRAWS: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    rows, bytes_at, mask, at = _bytes(num_blocks, block, stride, ROWS, STRIDE)
    a = tl.load(x + at, mask=mask, other=0.0)
    b = tl.load(x + at + stride, mask=mask, other=0.0)
    c = tl.load(x + at + 2 * stride, mask=mask, other=0.0)
    d = tl.load(x + at + 3 * stride, mask=mask, other=0.0)
    e = tl.load(x + at + 4 * stride, mask=mask, other=0.0)
    pairs = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    largest = tl.max(tl.maximum(pairs, tl.abs(e)), axis=1)
    is_zero = largest < _TINY
    if DRAWS:
        scale = tl.where(is_zero, 0.0, largest)
        limits = tl.where(is_zero, 0.0, tl.div_rn(tl.full([ROWS], 1.0, tl.float32), largest))
        limit = limits[:, None]
    else:
        limits = tl.where(is_zero, 1.0, tl.maximum(largest * threshold, _TINY))
        limit = limits[:, None]
        share = 1.0 / room
        even = (_kept(a, limit) * share + _kept(e, limit) * share) + _kept(c, limit) * share
        sums = even + (_kept(b, limit) * share + _kept(d, limit) * share)
        ones = _trit(a, limit, at, first, DRAWS) != 0
        count = ones.to(tl.int32) + (_trit(b, limit, at, first, DRAWS) != 0).to(tl.int32)
        count += (_trit(c, limit, at, first, DRAWS) != 0).to(tl.int32)
        count += (_trit(d, limit, at, first, DRAWS) != 0).to(tl.int32)
        count += (_trit(e, limit, at, first, DRAWS) != 0).to(tl.int32)
        total = tl.sum(tl.where(mask, count, 0), axis=1).to(tl.float32)
        scale = _mean(sums, total, room, ROWS, STRIDE, LEVELS)
    byte = _trit(a, limit, at, first, DRAWS) + 3 * _trit(b, limit, at + stride, first, DRAWS)
    byte += 9 * _trit(c, limit, at + 2 * stride, first, DRAWS) + 27 * _trit(d, limit, at + 3 * stride, first, DRAWS)
    byte += 81 * _trit(e, limit, at + 4 * stride, first, DRAWS)
    tl.store(scales + rows, scale, mask=rows < num_blocks)
    tl.store(packed + bytes_at, byte.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["first"])
def _ternary_encode_short(
    x, scales, packed, block, stride, room, threshold, first,
    DRAWS: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One block whose lanes are not those that are added up."""
    flat = tl.arange(0, WIDTH)[None, :]
    values = tl.load(x + flat, mask=flat < block, other=0.0)
    largest = tl.max(tl.abs(values), axis=1)
    is_zero = largest < _TINY
    if DRAWS:
        scale = tl.where(is_zero, 0.0, largest)
        limits = tl.where(is_zero, 0.0, tl.div_rn(tl.full([1], 1.0, tl.float32), largest))
    else:
        limits = tl.where(is_zero, 1.0, tl.maximum(largest * threshold, _TINY))
        count = tl.sum((tl.abs(values) >= limits[:, None]).to(tl.int32), axis=1).to(tl.float32)
        scale = _mean(_kept(values, limits[:, None]) * (1.0 / room), count, room, 1, WIDTH, LEVELS)
    tl.store(scales + tl.arange(0, 1), scale)
    columns = tl.arange(0, STRIDE)[None, :]
    byte = tl.zeros([1, STRIDE], tl.int32)
    for lane in tl.static_range(5):
        at = columns + (4 - lane) * stride
        value = tl.load(x + at, mask=(at < block) & (columns < stride), other=0.0)
        byte = byte * 3 + _trit(value, limits[:, None], at, first, DRAWS)
    tl.store(packed + columns, byte.to(tl.uint8), mask=columns < stride)


@triton.jit
def _ternary_decode(
    scales, packed, out, damage, weight, num_blocks, block, stride,
    ADDS: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    rows, bytes_at, mask, at = _bytes(num_blocks, block, stride, ROWS, STRIDE)
    scale = tl.load(scales + rows, mask=rows < num_blocks, other=0.0)
    _check_scales(scale, damage)
    byte = tl.load(packed + bytes_at, mask=mask, other=0).to(tl.int32)
    tl.store(damage, 1, mask=tl.max(tl.max(byte, axis=1), axis=0) > 242)
    worth, columns = (scale * weight)[:, None], tl.arange(0, STRIDE)[None, :]
    for lane in tl.static_range(5):
        trits = byte % 3
        byte = byte // 3
        values = ((trits & 1) - (trits >> 1)).to(tl.float32) * worth
        _emit(out, at + lane * stride, values, mask & (columns + lane * stride < block), ADDS)


@triton.jit(do_not_specialize=["first"])
def _natural_encode(x, heads, codes, num_blocks, block, first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rows, at, mask = _rows(num_blocks, block, ROWS, WIDTH)
    bits = tl.load(x + at, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    drawn = (_noise(first, at) & 0x7FFFFF).to(tl.int32)
    magnitude = bits & 0x7FFFFFFF
    exponents = tl.where(mask, tl.minimum((magnitude + drawn) >> 23, 254), 0)
    reference = tl.max(exponents, axis=1)
    code = tl.where(exponents > 0, tl.maximum(exponents - reference[:, None] + 127, 0), 0)
    code = code | ((bits < 0).to(tl.int32) << 7)
    is_finite = tl.max(magnitude, axis=1) < 0x7F800000
    tl.store(heads + rows, tl.where(is_finite, reference, 255).to(tl.uint8), mask=rows < num_blocks)
    tl.store(codes + at, code.to(tl.uint8), mask=mask)


@triton.jit
def _natural_decode(
    heads, codes, out, damage, weight, num_blocks, block, ADDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    rows, at, mask = _rows(num_blocks, block, ROWS, WIDTH)
    reference = tl.load(heads + rows, mask=rows < num_blocks, other=0).to(tl.int32)
    tl.store(damage, 1, mask=tl.max(reference, axis=0) > 254)
    code = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
    magnitude = code & 127
    exponents = tl.where(magnitude > 0, tl.maximum(magnitude + reference[:, None] - 127, 0), 0)
    values = ((exponents << 23) | ((code >> 7) << 31)).to(tl.float32, bitcast=True)
    _emit(out, at, values * weight, mask, ADDS)


@triton.jit
def _checksum(words, total, num_words, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = at < num_words
    word = tl.load(words + at, mask=mask, other=0).to(tl.uint32, bitcast=True)
    term = _mixed(at.to(tl.uint32) * tl.full([], 0x9E3779B9, tl.uint32) + word)
    tl.atomic_add(total, tl.sum(tl.where(mask, term, 0).to(tl.int64), axis=0))


@dataclass(frozen=True)
class _Part:
    """Blocks of one length, that programs of one start take: all full ones, or the short last one.

    What a start needs is worked out once for each size of message: on a GPU that takes as long as the kernel.
    """

    num_blocks: int
    block: int
    row_bytes: int
    elements: slice
    heads: slice
    bodies: slice

    @cached_property
    def rows(self) -> int:
        """Blocks that a program takes."""
        return max(1, _PROGRAM_ELEMENTS // int(triton.next_power_of_2(self.block))) if self.num_blocks > 1 else 1

    @cached_property
    def grid(self) -> tuple[int]:
        """Programs."""
        return (int(triton.cdiv(self.num_blocks, self.rows)),)

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """For kernels that see a block as a row of elements."""
        return {"ROWS": self.rows, "WIDTH": triton.next_power_of_2(self.block), "enable_fp_fusion": False}

    @cached_property
    def lane_sizes(self) -> dict[str, Any]:
        """For kernels that see a block as lanes of bytes."""
        return {"ROWS": self.rows, "STRIDE": triton.next_power_of_2(self.row_bytes), "enable_fp_fusion": False}

    def sum_sizes(self, room: int, num_lanes: int) -> dict[str, Any] | None:
        """For kernels that see lanes and add them up by halves; None where the lanes do not fill the room so."""
        fits = self.block == num_lanes * self.row_bytes and 8 * self.row_bytes == room
        return {"LEVELS": self.row_bytes.bit_length() - 1, **self.lane_sizes} if fits else None

    def short_sizes(self, room: int) -> dict[str, Any]:
        """For kernels that see one block both ways."""
        stride = triton.next_power_of_2(self.row_bytes)
        return {"LEVELS": room.bit_length() - 1, "STRIDE": stride, "WIDTH": room, "enable_fp_fusion": False}


def _parts(
    num_elements: int, block: int, payload: Tensor, row_bytes: Callable[[int], int], head_bytes: int = 4
) -> list[_Part]:
    """The parts of a message; none where there is nothing, or its blocks or its place are not for programs."""
    suits = block <= _MAX_BLOCK and payload.data_ptr() % 4 == 0
    return _cut(num_elements, block, row_bytes, head_bytes) if suits else []


@lru_cache(maxsize=1024)
def _cut(num_elements: int, block: int, row_bytes: Callable[[int], int], head_bytes: int) -> list[_Part]:
    num_full, rest = divmod(num_elements, block)
    body = (num_full + (rest > 0)) * head_bytes
    end = body + num_full * row_bytes(block)
    full = _Part(
        num_full, block, row_bytes(block), slice(0, num_full * block), slice(0, num_full * head_bytes), slice(body, end)
    )
    short = _Part(
        1, rest, row_bytes(rest), slice(num_full * block, None), slice(num_full * head_bytes, body), slice(end, None)
    )
    return [full] * (num_full > 0) + [short] * (rest > 0)


def _floats(payload: Tensor, part: _Part) -> Tensor:
    return payload[part.heads].view(torch.float32)


class _Damage(threading.local):
    """A word on each device that kernels mark; zero unless something was damaged. Each thread has its own words: one
    must not take, and clear, the mark of another's message."""

    def __init__(self) -> None:
        self._words: dict[torch.device, Tensor] = {}

    def word(self, device: torch.device) -> Tensor:
        """The word to mark, zero."""
        if device not in self._words:
            self._words[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._words[device]

    def take(self, device: torch.device) -> bool:
        """Whether it was marked since; waits for the kernels."""
        is_marked = bool(self._words[device])
        if is_marked:
            self._words[device].zero_()
        return is_marked


def _bits_row(block: int) -> int:
    return packed_bytes(block, 1)


def _bytes_row(block: int) -> int:
    return block


class TritonKernels(TorchKernels):
    """The arithmetic on CUDA."""

    def __init__(self) -> None:
        self._damage = _Damage()

    @override
    def checksum(self, payload: Tensor) -> int:
        if payload.numel() % 4 or payload.data_ptr() % 4 or not payload.numel():
            return super().checksum(payload)
        words = payload.view(torch.int32)
        total = torch.zeros(1, dtype=torch.int64, device=payload.device)
        _checksum[triton.cdiv(words.numel(), _PROGRAM_ELEMENTS),](words, total, words.numel(), SIZE=_PROGRAM_ELEMENTS)
        return int(total) & 0xFFFFFFFF

    @override
    def int8_encode(self, x: Tensor, block: int, out: Tensor) -> None:
        parts = _parts(x.numel(), block, out, _bytes_row)
        if not parts:
            return super().int8_encode(x, block, out)
        for part in parts:
            codes = out[part.bodies].view(torch.int8)
            _int8_encode[part.grid](
                x[part.elements], _floats(out, part), codes, part.num_blocks, part.block, **part.sizes
            )
        return None

    @override
    def int8_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        parts, damage = _parts(out.numel(), block, payload, _bytes_row), self._damage.word(out.device)
        if not parts:
            return super().int8_decode(payload, block, out, weight, adds)
        for part in parts:
            scales, codes, target = _floats(payload, part), payload[part.bodies].view(torch.int8), out[part.elements]
            _int8_decode[part.grid](
                scales, codes, target, damage, weight, part.num_blocks, part.block, ADDS=adds, **part.sizes
            )
        return not self._damage.take(out.device)

    @override
    def sign_encode(self, x: Tensor, block: int, out: Tensor) -> None:
        parts, room = _parts(x.numel(), block, out, _bits_row), int(triton.next_power_of_2(block))
        if not parts:
            return super().sign_encode(x, block, out)
        for part in parts:
            tensors = x[part.elements], _floats(out, part), out[part.bodies]
            sizes = part.sum_sizes(room, 8)
            if sizes is not None:
                _sign_encode[part.grid](*tensors, part.num_blocks, part.block, part.row_bytes, float(room), **sizes)
            elif part.num_blocks == 1:
                _sign_encode_short[1,](*tensors, part.block, part.row_bytes, float(room), **part.short_sizes(room))
            else:
                return super().sign_encode(x, block, out)
        return None

    @override
    def sign_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        parts, damage = _parts(out.numel(), block, payload, _bits_row), self._damage.word(out.device)
        if not parts:
            return super().sign_decode(payload, block, out, weight, adds)
        for part in parts:
            tensors = _floats(payload, part), payload[part.bodies], out[part.elements]
            numbers = damage, weight, part.num_blocks, part.block, part.row_bytes
            _sign_decode[part.grid](*tensors, *numbers, ADDS=adds, **part.lane_sizes)
        return not self._damage.take(out.device)

    @override
    def ternary_encode(self, x: Tensor, block: int, threshold: float, out: Tensor) -> None:
        if not _encode_ternary(x, block, out, threshold=threshold, first=0, draws=False):
            super().ternary_encode(x, block, threshold, out)

    @override
    def ternary_draw(self, x: Tensor, block: int, key: int, offset: int, out: Tensor) -> None:
        if not _encode_ternary(x, block, out, threshold=0.0, first=first_bits(key, offset), draws=True):
            super().ternary_draw(x, block, key, offset, out)

    @override
    def ternary_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        parts, damage = _parts(out.numel(), block, payload, trit_bytes), self._damage.word(out.device)
        if not parts:
            return super().ternary_decode(payload, block, out, weight, adds)
        for part in parts:
            tensors = _floats(payload, part), payload[part.bodies], out[part.elements]
            numbers = damage, weight, part.num_blocks, part.block, part.row_bytes
            _ternary_decode[part.grid](*tensors, *numbers, ADDS=adds, **part.lane_sizes)
        return not self._damage.take(out.device)

    @override
    def natural_encode(self, x: Tensor, block: int, key: int, offset: int, out: Tensor) -> None:
        parts = _parts(x.numel(), block, out, _bytes_row, head_bytes=1)
        if not parts:
            return super().natural_encode(x, block, key, offset, out)
        for part in parts:
            tensors = x[part.elements], out[part.heads], out[part.bodies]
            first = first_bits(key, offset + part.elements.start)
            _natural_encode[part.grid](*tensors, part.num_blocks, part.block, first, **part.sizes)
        return None

    @override
    def natural_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        parts, damage = _parts(out.numel(), block, payload, _bytes_row, head_bytes=1), self._damage.word(out.device)
        if not parts:
            return super().natural_decode(payload, block, out, weight, adds)
        for part in parts:
            tensors = payload[part.heads], payload[part.bodies], out[part.elements]
            _natural_decode[part.grid](*tensors, damage, weight, part.num_blocks, part.block, ADDS=adds, **part.sizes)
        return not self._damage.take(out.device)


def _encode_ternary(x: Tensor, block: int, out: Tensor, *, threshold: float, first: int, draws: bool) -> bool:
    """Whether there are kernels for these blocks."""
    parts, room = _parts(x.numel(), block, out, trit_bytes), int(triton.next_power_of_2(block))
    for part in parts:
        tensors = x[part.elements], _floats(out, part), out[part.bodies]
        start = first_bits(first, part.elements.start)
        sizes = part.sum_sizes(room, 5)
        if sizes is not None:
            numbers = part.num_blocks, part.block, part.row_bytes, float(room), threshold, start
            _ternary_encode[part.grid](*tensors, *numbers, DRAWS=draws, **sizes)
        elif part.num_blocks == 1:
            short = part.block, part.row_bytes, float(room), threshold, start
            _ternary_encode_short[1,](*tensors, *short, DRAWS=draws, **part.short_sizes(room))
        else:
            return False
    return bool(parts)
