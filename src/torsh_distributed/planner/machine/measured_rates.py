"""Rates of a machine by shape and size, measured at some points and interpolated between them."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "elementwise": (),
    "activation": ("gelu", "silu", "sigmoid", "tanh", "exp", "log", "rsqrt", "sqrt", "erf", "cos", "sin"),
    "activation backward": ("gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward"),
    "softmax": ("_softmax", "_log_softmax"),
    "softmax backward": ("_softmax_backward_data", "_log_softmax_backward_data"),
    "norm": ("native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm"),
    "norm backward": ("native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward"),
    "lookup": ("embedding", "index", "gather", "index_select"),
    "lookup backward": ("embedding_dense_backward", "index_put", "scatter", "scatter_add", "index_add"),
    "sum": ("sum", "mean", "amax", "max", "linalg_vector_norm", "norm"),
    "copy": ("clone", "_to_copy", "copy", "cat", "stack", "fill_", "zero_", "new_zeros", "zeros_like", "ones_like"),
    "random": ("bernoulli_", "native_dropout", "uniform_", "normal_", "rand_like", "randn"),
    "power": ("pow",),
}
"""Operations that one measurement stands for; those that are nowhere are elementwise."""

_FAMILY_OF = {name: family for family, names in FAMILIES.items() for name in names}


def family_of(name: str) -> str:
    """The family of an operation by its name in torch."""
    return _FAMILY_OF.get(name) or _FAMILY_OF.get(name.rstrip("_")) or "elementwise"


@dataclass(frozen=True)
class SizeTable:
    """Seconds by the size of what is done, between measured sizes and beyond them."""

    sizes: tuple[float, ...]
    """From the smallest to the largest."""
    seconds: tuple[float, ...]

    @classmethod
    def read(cls, found: Mapping[str, Sequence[float]]) -> Self:
        """The table in what `asdict` made of one."""
        sizes, seconds = tuple(map(float, found["sizes"])), tuple(map(float, found["seconds"]))
        is_rising = all(one < other for one, other in itertools.pairwise((0.0, *sizes, math.inf)))
        if not sizes or len(sizes) != len(seconds) or not is_rising or not all(0 <= one < math.inf for one in seconds):
            raise ValueError(f"sizes {sizes} with seconds {seconds}")
        return cls(sizes, seconds)

    def seconds_at(self, size: float) -> float:
        """On a straight line between neighbours; beyond the last in proportion; below the first as long as it."""
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        if size >= sizes[-1]:
            return seconds[-1] * size / sizes[-1]
        place = bisect.bisect_right(sizes, size)
        left, right = sizes[place - 1], sizes[place]
        share = (size - left) / (right - left)
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])


@dataclass(frozen=True, kw_only=True)
class CodecRate:
    """One method of compression, with some ranks at work on the machine."""

    travels: str
    """Messages are *summed* on the way; or each rank decodes its shard of all and sends the mean (*exchanged*); or
    each decodes all of them (*gathered*)."""
    share: float
    """Bytes of a large message over those of the gradient."""
    encode: SizeTable
    decode: SizeTable
    average: SizeTable | None
    """Whole averages over the ranks that were measured; None for one rank."""

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Self:
        """The rate in what `asdict` made of one."""
        return cls(
            travels=str(found["travels"]),
            share=float(found["share"]),
            encode=SizeTable.read(found["encode"]),
            decode=SizeTable.read(found["decode"]),
            average=None if found["average"] is None else SizeTable.read(found["average"]),
        )

    def busy_s(self, num_bytes: float, num_ranks: int) -> float:
        """What one rank computes for an average."""
        num_decodes = {"summed": 1, "exchanged": 2, "gathered": num_ranks}[self.travels]
        return self.encode.seconds_at(num_bytes) + num_decodes * self.decode.seconds_at(num_bytes)


@dataclass(frozen=True)
class ProductTable:
    """Operations in a second of products of m × k by k × n matrices, on a grid of sides."""

    sides: tuple[int, ...]
    """Of m, n and k alike, from the smallest to the largest."""
    flops_per_s: tuple[tuple[tuple[float, ...], ...], ...]
    """By m, n and k."""

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Self:
        """The table in what `asdict` made of one."""
        sides = tuple(map(int, found["sides"]))
        cube = tuple(tuple(tuple(map(float, line)) for line in plane) for plane in found["flops_per_s"])
        rates = [rate for plane in cube for line in plane for rate in line]
        lengths = {len(cube), *map(len, cube), *(len(line) for plane in cube for line in plane)}
        is_rising = all(one < other for one, other in itertools.pairwise((0, *sides)))
        if len(sides) < 2 or lengths != {len(sides)} or not is_rising or not all(0 < one < math.inf for one in rates):
            raise ValueError(f"rates of products are not on a grid of sides {sides}")
        return cls(sides, cube)

    def rate(self, m: float, n: float, k: float) -> float:
        """At any shape: between points of the grid by the logarithms of sides and rates; above it, that of the edge.

        Below the smallest side a product takes as long as one of that side: it waits for its operands.
        """
        places = [self._place(one) for one in (m, n, k)]
        total = 0.0
        for corner in itertools.product((0, 1), repeat=3):
            weight = math.prod(share if side else 1 - share for (_, share), side in zip(places, corner, strict=True))
            if weight:
                i, j, h = (low + side for (low, _), side in zip(places, corner, strict=True))
                total += weight * math.log(self.flops_per_s[i][j][h])
        return math.exp(total) * math.prod(min(1.0, side / self.sides[0]) for side in (m, n, k))

    def _place(self, side: float) -> tuple[int, float]:
        """The grid point below, and how far above it, from 0 to 1."""
        sides: Sequence[int] = self.sides
        if side <= sides[0]:
            return 0, 0.0
        if side >= sides[-1]:
            return len(sides) - 2, 1.0
        low = bisect.bisect_right(sides, side) - 1
        return low, math.log(side / sides[low]) / math.log(sides[low + 1] / sides[low])


@dataclass(frozen=True, kw_only=True)
class OperationRates:
    """What was measured of one device with some ranks at work on the machine."""

    products: Mapping[str, ProductTable]
    """By format, as in `precision.dtype`."""
    attention: Mapping[str, SizeTable]
    """By format, and by format with `backward`: seconds by operations."""
    families: Mapping[str, SizeTable]
    """By family: seconds by bytes that are read and written."""
    launch_s: float
    """What autograd adds to an operation in forward."""
    backward_launch_s: float
    """What it adds in backward."""
    update: SizeTable
    """Of the optimizer step of one tensor: seconds by its bytes."""
