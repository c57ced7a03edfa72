"""The kernels for CUDA: each message in one pass over the tensor, where torch's operators need many.

A program takes whole blocks, a few at a time; the short last block of a message has its own launch. What has no program
in `triton_programs` uses torch's operators.
"""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, type-arg"
# Triton has no types.

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.kernels import triton_programs as programs
from torsh_distributed.compress.kernels.bits import packed_bytes, trit_bytes
from torsh_distributed.compress.kernels.noise import first_bits
from torsh_distributed.compress.kernels.torch_kernels import TorchKernels

_PROGRAM_ELEMENTS = 4096
_MAX_BLOCK = 8192  # larger ones do not fit the registers of a program


@dataclass(frozen=True)
class _BlockRun:
    """Blocks of one length, taken by the programs of one launch: all full ones, or the short last one.

    Launch arguments are computed once for each message size: computing them takes as long as the kernel.
    """

    num_blocks: int
    block: int
    row_bytes: int
    elements: slice
    heads: slice
    bodies: slice

    @cached_property
    def rows(self) -> int:
        """Blocks for each program."""
        return max(1, _PROGRAM_ELEMENTS // int(triton.next_power_of_2(self.block))) if self.num_blocks > 1 else 1

    @cached_property
    def grid(self) -> tuple[int]:
        """Programs."""
        return (int(triton.cdiv(self.num_blocks, self.rows)),)

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """For programs that see a block as a row of elements."""
        return {"ROWS": self.rows, "WIDTH": triton.next_power_of_2(self.block), "enable_fp_fusion": False}

    @cached_property
    def lane_sizes(self) -> dict[str, Any]:
        """For programs that see a block as lanes of bytes."""
        return {"ROWS": self.rows, "STRIDE": triton.next_power_of_2(self.row_bytes), "enable_fp_fusion": False}

    def sum_sizes(self, room: int, num_lanes: int) -> dict[str, Any] | None:
        """For programs that see lanes and sum them by halves; None if the lanes do not fill the room evenly."""
        fits = self.block == num_lanes * self.row_bytes and 8 * self.row_bytes == room
        return {"LEVELS": self.row_bytes.bit_length() - 1, **self.lane_sizes} if fits else None

    def short_sizes(self, room: int) -> dict[str, Any]:
        """For programs that see one block both ways."""
        stride = triton.next_power_of_2(self.row_bytes)
        return {"LEVELS": room.bit_length() - 1, "STRIDE": stride, "WIDTH": room, "enable_fp_fusion": False}


def _block_runs(
    num_elements: int, block: int, payload: Tensor, row_bytes: Callable[[int], int], head_bytes: int = 4
) -> list[_BlockRun]:
    """The block runs of a message; none if it is empty, its blocks are too large or it is not aligned for programs."""
    suits = block <= _MAX_BLOCK and payload.data_ptr() % 4 == 0
    return _cut_into_runs(num_elements, block, row_bytes, head_bytes) if suits else []


@lru_cache(maxsize=1024)
def _cut_into_runs(num_elements: int, block: int, row_bytes: Callable[[int], int], head_bytes: int) -> list[_BlockRun]:
    num_full, rest = divmod(num_elements, block)
    body = (num_full + (rest > 0)) * head_bytes
    end = body + num_full * row_bytes(block)
    full = _BlockRun(
        num_full, block, row_bytes(block), slice(0, num_full * block), slice(0, num_full * head_bytes), slice(body, end)
    )
    short = _BlockRun(
        1, rest, row_bytes(rest), slice(num_full * block, None), slice(num_full * head_bytes, body), slice(end, None)
    )
    return [full] * (num_full > 0) + [short] * (rest > 0)


def _floats(payload: Tensor, run: _BlockRun) -> Tensor:
    return payload[run.heads].view(torch.float32)


class _Damage(threading.local):
    """A word on each device that kernels set when a message is damaged. Each thread has its own words, so it neither
    sees nor clears the mark of another thread's message."""

    def __init__(self) -> None:
        self._words: dict[torch.device, Tensor] = {}

    def word(self, device: torch.device) -> Tensor:
        """The word that kernels set; zero."""
        if device not in self._words:
            self._words[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._words[device]

    def take(self, device: torch.device) -> bool:
        """Whether it was set since, and clear it; waits for the kernels."""
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
        programs.checksum[triton.cdiv(words.numel(), _PROGRAM_ELEMENTS),](
            words, total, words.numel(), SIZE=_PROGRAM_ELEMENTS
        )
        return int(total) & 0xFFFFFFFF

    @override
    def int8_encode(self, x: Tensor, block: int, out: Tensor) -> None:
        runs = _block_runs(x.numel(), block, out, _bytes_row)
        if not runs:
            return super().int8_encode(x, block, out)
        for run in runs:
            codes = out[run.bodies].view(torch.int8)
            programs.int8_encode[run.grid](
                x[run.elements], _floats(out, run), codes, run.num_blocks, run.block, **run.sizes
            )
        return None

    @override
    def int8_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        runs, damage = _block_runs(out.numel(), block, payload, _bytes_row), self._damage.word(out.device)
        if not runs:
            return super().int8_decode(payload, block, out, weight, adds)
        for run in runs:
            scales, codes, target = _floats(payload, run), payload[run.bodies].view(torch.int8), out[run.elements]
            programs.int8_decode[run.grid](
                scales, codes, target, damage, weight, run.num_blocks, run.block, ADDS=adds, **run.sizes
            )
        return not self._damage.take(out.device)

    @override
    def sign_encode(self, x: Tensor, block: int, out: Tensor) -> None:
        runs, room = _block_runs(x.numel(), block, out, _bits_row), int(triton.next_power_of_2(block))
        if not runs:
            return super().sign_encode(x, block, out)
        for run in runs:
            tensors = x[run.elements], _floats(out, run), out[run.bodies]
            sizes = run.sum_sizes(room, 8)
            if sizes is not None:
                programs.sign_encode[run.grid](*tensors, run.num_blocks, run.block, run.row_bytes, float(room), **sizes)
            elif run.num_blocks == 1:
                programs.sign_encode_short[1,](*tensors, run.block, run.row_bytes, float(room), **run.short_sizes(room))
            else:
                return super().sign_encode(x, block, out)
        return None

    @override
    def sign_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        runs, damage = _block_runs(out.numel(), block, payload, _bits_row), self._damage.word(out.device)
        if not runs:
            return super().sign_decode(payload, block, out, weight, adds)
        for run in runs:
            tensors = _floats(payload, run), payload[run.bodies], out[run.elements]
            numbers = damage, weight, run.num_blocks, run.block, run.row_bytes
            programs.sign_decode[run.grid](*tensors, *numbers, ADDS=adds, **run.lane_sizes)
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
        runs, damage = _block_runs(out.numel(), block, payload, trit_bytes), self._damage.word(out.device)
        if not runs:
            return super().ternary_decode(payload, block, out, weight, adds)
        for run in runs:
            tensors = _floats(payload, run), payload[run.bodies], out[run.elements]
            numbers = damage, weight, run.num_blocks, run.block, run.row_bytes
            programs.ternary_decode[run.grid](*tensors, *numbers, ADDS=adds, **run.lane_sizes)
        return not self._damage.take(out.device)

    @override
    def natural_encode(self, x: Tensor, block: int, key: int, offset: int, out: Tensor) -> None:
        runs = _block_runs(x.numel(), block, out, _bytes_row, head_bytes=1)
        if not runs:
            return super().natural_encode(x, block, key, offset, out)
        for run in runs:
            tensors = x[run.elements], out[run.heads], out[run.bodies]
            first = first_bits(key, offset + run.elements.start)
            programs.natural_encode[run.grid](*tensors, run.num_blocks, run.block, first, **run.sizes)
        return None

    @override
    def natural_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        runs, damage = _block_runs(out.numel(), block, payload, _bytes_row, head_bytes=1), self._damage.word(out.device)
        if not runs:
            return super().natural_decode(payload, block, out, weight, adds)
        for run in runs:
            tensors = payload[run.heads], payload[run.bodies], out[run.elements]
            programs.natural_decode[run.grid](
                *tensors, damage, weight, run.num_blocks, run.block, ADDS=adds, **run.sizes
            )
        return not self._damage.take(out.device)


def _encode_ternary(x: Tensor, block: int, out: Tensor, *, threshold: float, first: int, draws: bool) -> bool:
    """Encode if there are programs for these blocks; returns whether there are."""
    runs, room = _block_runs(x.numel(), block, out, trit_bytes), int(triton.next_power_of_2(block))
    for run in runs:
        tensors = x[run.elements], _floats(out, run), out[run.bodies]
        start = first_bits(first, run.elements.start)
        sizes = run.sum_sizes(room, 5)
        if sizes is not None:
            numbers = run.num_blocks, run.block, run.row_bytes, float(room), threshold, start
            programs.ternary_encode[run.grid](*tensors, *numbers, DRAWS=draws, **sizes)
        elif run.num_blocks == 1:
            short = run.block, run.row_bytes, float(room), threshold, start
            programs.ternary_encode_short[1,](*tensors, *short, DRAWS=draws, **run.short_sizes(room))
        else:
            return False
    return bool(runs)
