"""The Triton programs of the kernels for CUDA: each encodes or decodes some blocks of a message in one pass.

Products and sums are rounded one by one (the launcher sets `enable_fp_fusion=False`) and divisions exactly, so the
bytes are those of the C in `native/`. Launched by `triton_kernels`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, type-arg"
# ruff: noqa: ANN001, ANN201, ANN202, D103, N803
# Functions under @triton.jit are written in Triton's language, which looks like Python and has other types.

from __future__ import annotations

import triton
import triton.language as tl

from torsh_distributed.compress.kernels.base import TINY

_TINY = tl.constexpr(TINY)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to the nearest integer, ties to even


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
    """Set the damage word if a scale is negative or not finite."""
    bits = scales.to(tl.int32, bitcast=True)
    is_bad = (bits < 0) | ((bits & 0x7F800000) == 0x7F800000)
    tl.store(damage, 1, mask=tl.max(is_bad.to(tl.int32), axis=0) > 0)


@triton.jit
def _emit(out, at, values, mask, ADDS: tl.constexpr):
    if ADDS:
        values = tl.load(out + at, mask=mask, other=0.0) + values
    tl.store(out + at, values, mask=mask)


@triton.jit
def int8_encode(x, scales, codes, num_blocks, block, ROWS: tl.constexpr, WIDTH: tl.constexpr):
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
def int8_decode(
    scales, codes, out, damage, weight, num_blocks, block, ADDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    rows, at, mask = _rows(num_blocks, block, ROWS, WIDTH)
    scale = tl.load(scales + rows, mask=rows < num_blocks, other=0.0)
    _check_scales(scale, damage)
    code = tl.load(codes + at, mask=mask, other=0)
    _emit(out, at, code.to(tl.float32) * (scale * weight)[:, None], mask, ADDS)


@triton.jit
def sign_encode(
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
def sign_encode_short(
    x, scales, packed, block, stride, room, STRIDE: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr
):
    """One block whose lanes differ from those that are summed."""
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
def sign_decode(
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
def ternary_encode(
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
def ternary_encode_short(
    x, scales, packed, block, stride, room, threshold, first,
    DRAWS: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One block whose lanes differ from those that are summed."""
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
def ternary_decode(
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
def natural_encode(x, heads, codes, num_blocks, block, first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
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
def natural_decode(
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
def checksum(words, total, num_words, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = at < num_words
    word = tl.load(words + at, mask=mask, other=0).to(tl.uint32, bitcast=True)
    term = _mixed(at.to(tl.uint32) * tl.full([], 0x9E3779B9, tl.uint32) + word)
    tl.atomic_add(total, tl.sum(tl.where(mask, term, 0).to(tl.int64), axis=0))
