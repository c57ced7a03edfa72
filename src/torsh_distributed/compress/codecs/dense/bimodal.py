"""Codebook: the few values that fit a gradient best, and which of them each element gets."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.codecs.dense.quantiser import ROUNDING
from torsh_distributed.compress.kernels.base import NUM_BINS, Histogram
from torsh_distributed.compress.kernels.bits import blocks_packed_bytes
from torsh_distributed.compress.kernels.kernel_choice import kernels_for

_NUM_PASSES = 12
_HALF = NUM_BINS // 2
_TINY_RANK = 7 << 4  # of 2**-120, as in Histogram.largest: tensors below are sent as zeros
_INFINITE_RANK = 255 << 4


class BimodalCodec(DenseCodec):
    """Send for each element which of `num_entries` values is nearest; the values are fitted to each message.

    They are found by Lloyd's passes over a histogram, starting from cells that separate positive from negative values:
    no pass increases the error, and each value is the exact mean of its cell.
    Payload: values fp32 (entries), indices of b = ceil(log2 entries) bits (elements) packed as `bits.py` says:
    4 entries + ceil(n b / 8) bytes, up to 2 more where n is not a multiple of 8, and none for an empty tensor.
    """

    name = "bimodal"
    is_deterministic = True
    block = 1024

    def __init__(self, num_entries: int = 16, *, server_feedback: bool = False) -> None:
        super().__init__(server_feedback=server_feedback)
        self.num_entries = num_entries
        self.parameter = num_entries
        self._bits = (num_entries - 1).bit_length()

    @override
    def write(self, x: Tensor, out: Tensor, *, seed: int, offset: int = 0) -> None:
        if x.numel() == 0:
            return
        kernels = kernels_for(x)
        histogram = kernels.histogram(x)
        codebook = fit_codebook(histogram, self.num_entries)
        head_bytes = 4 * self.num_entries
        out[:head_bytes].copy_(codebook.values.view(torch.uint8))
        kernels.codebook_encode(x, self.block, histogram.largest, codebook.entries, self._bits, out[head_bytes:])

    @override
    def read(self, payload: Tensor, out: Tensor, *, weight: float = 1.0, adds: bool = False) -> bool:
        if out.numel() == 0:
            return True
        head_bytes = 4 * self.num_entries
        values = payload[:head_bytes].cpu().clone().view(torch.float32)
        return kernels_for(out).codebook_decode(payload[head_bytes:], self.block, values, out, weight, adds)

    @override
    def payload_bytes(self, num_elements: int) -> int:
        head_bytes = 4 * self.num_entries if num_elements else 0
        return head_bytes + blocks_packed_bytes(num_elements, self.block, self._bits)

    @override
    def contraction(self, num_elements: int) -> float | None:
        # No worse than the means of the positive and of the negative elements, which leave at most |x|² - |x|₁² / n;
        # magnitudes 32 octaves below the largest count as zero.
        return (1 - 1024 * ROUNDING) / max(1, num_elements)


class Codebook(NamedTuple):
    """Values, and which of them each bin's elements get."""

    values: Tensor
    """fp32 (entries), ascending."""
    entries: Tensor
    """uint8 (NUM_BINS)."""


def fit_codebook(histogram: Histogram, num_entries: int) -> Codebook:
    """Fit the values by a few passes that reduce the squared error. The same on every device: bins are exact."""
    entries = torch.zeros(NUM_BINS, dtype=torch.uint8)
    values = torch.zeros(num_entries, dtype=torch.float32)
    if histogram.largest < _TINY_RANK:
        return Codebook(values, entries)
    if histogram.largest >= _INFINITE_RANK:
        return Codebook(values.fill_(torch.nan), entries)  # receivers refuse it
    points, counts, bins = _points(histogram)
    cells = _first_cells(points, counts, num_entries)
    means = _cell_means(points, counts, cells, points.new_zeros(num_entries))
    for _ in range(_NUM_PASSES):
        means = means.sort().values  # an empty cell keeps its old mean, which may be out of order by now
        cells = torch.bucketize(points, (means[1:] + means[:-1]) / 2)
        means = _cell_means(points, counts, cells, means)
    entries[bins] = cells.to(torch.uint8)
    return Codebook(means.to(torch.float32), entries)


def _points(histogram: Histogram) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, the count and the number of each bin that is not empty, by ascending mean; float64, float64, int64."""
    bins = torch.cat([torch.arange(NUM_BINS - 1, _HALF - 1, -1), torch.arange(_HALF)])
    bins = bins[histogram.counts[bins] > 0]
    counts = histogram.counts[bins].double()
    distance = bins % _HALF
    exponents = (distance + histogram.largest - (_HALF - 1)) // 16
    means = torch.ldexp(histogram.sums[bins].double() / counts, exponents - 150)
    means = means.where(distance > 0, 0.0)
    return means.where(bins < _HALF, -means), counts, bins


def _first_cells(points: Tensor, counts: Tensor, num_entries: int) -> Tensor:
    """Cells with about equal shares of density ** (1/3), the optimal distribution for many values."""
    share = (counts * points.square()).pow(1 / 3)
    is_positive = points >= 0
    below, total = float(share[~is_positive].sum()), float(share.sum())
    num_below = round(num_entries * below / total)
    num_below = min(max(num_below, int((~is_positive).any())), num_entries - int(is_positive.any()))
    cells = torch.empty_like(points, dtype=torch.int64)
    for side, first, num_cells in ((~is_positive, 0, num_below), (is_positive, num_below, num_entries - num_below)):
        if bool(side.any()):
            before = share[side].cumsum(0) - share[side] / 2
            place = (before / share[side].sum().clamp(min=1e-300) * num_cells).long()
            cells[side] = first + place.clamp(max=num_cells - 1)
    return cells


def _cell_means(points: Tensor, counts: Tensor, cells: Tensor, otherwise: Tensor) -> Tensor:
    num_cells = otherwise.numel()
    weights = torch.bincount(cells, counts, minlength=num_cells)
    sums = torch.bincount(cells, counts * points, minlength=num_cells)
    return torch.where(weights > 0, sums / weights, otherwise)
