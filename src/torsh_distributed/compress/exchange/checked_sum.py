"""Checked sums: all-reduces whose results are compared between the ranks.

A sum cannot carry a checksum of its summands' bits. Two checks take its place:

- Every rank compares a checksum of the bits it received with the other ranks'. This finds any damage to the finished
  sum on its way to some ranks, the case in which ranks would continue with different values.
- The sum of all elements is linear: the ranks' own sums must add up to the sum of the result, up to rounding. This
  finds damage to a summand, or to a partial sum, that changes an element by more than P·2**-23 times the sum of all
  magnitudes on all ranks. Smaller damage, and damages that cancel out, go unnoticed; all ranks then continue with the
  same slightly wrong values.

If a check fails, every rank raises, because all compare the same numbers: four doubles a rank and sum, gathered once at
the end of an average.
"""

from __future__ import annotations

import math
from statistics import mode
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.moves import all_gather
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.compress.kernels.kernel_choice import kernels_for
from torsh_distributed.errors import CompressionError

_ROUNDING = 2.0**-23  # twice what adding two fp32 numbers can lose, relative to their magnitudes
_SMALLEST = 1e-30  # subnormal numbers may be flushed to zero
_OVERFLOWED = -1.0


class SumFacts(NamedTuple):
    """What one rank knows of one sum."""

    own_total: float
    """Sum of the elements it contributed."""
    own_magnitude: float
    """Sum of their magnitudes."""
    total: float
    """Sum of the elements of the result."""
    checksum: float
    """Of the bits of the result; `_OVERFLOWED` if the result holds infinity or NaN, whose bits may differ."""


class CheckedSums:
    """The all-reduces of one average; every rank makes one for each average.

    Results may be used at once, but are known to be right only after `raise_together`.
    """

    def __init__(self, codec: str, group: dist.ProcessGroup) -> None:
        self._codec = codec
        self._group = group
        self._facts: list[SumFacts] = []

    def all_reduce(self, message: Tensor) -> Tensor:
        """Sum fp32 values over all ranks, in place."""
        if message.numel() == 0 or self._group.size() == 1:
            return message
        own_total = float(message.sum(dtype=torch.float64))
        own_magnitude = float(torch.linalg.vector_norm(message, 1))
        all_reduce(message, group=self._group)
        total = float(message.sum(dtype=torch.float64))
        checksum = float(kernels_for(message).checksum(message.view(torch.uint8)))
        self._facts.append(SumFacts(own_total, own_magnitude, total, checksum if math.isfinite(total) else _OVERFLOWED))
        return message

    def raise_together(self, device: torch.device) -> None:
        """Raise on every rank if a sum was damaged; every rank calls it once, after the last sum."""
        if not self._facts:
            return
        own = torch.tensor(self._facts, dtype=torch.float64).to(device)
        everyone = [[SumFacts(*facts) for facts in rank.tolist()] for rank in all_gather(own, group=self._group)]
        for facts in zip(*everyone, strict=True):
            damage = find_damage(facts)
            if damage is not None:
                raise CompressionError(
                    f"the sum of the ranks' {self._codec} messages was damaged on its way: {damage.what}",
                    hint="look at the network and the memory of the ranks named, then of all ranks",
                    ranks=damage.ranks,
                )


class SumDamage(NamedTuple):
    """How a sum is known to be wrong, and on which ranks."""

    what: str
    ranks: list[int]


def find_damage(facts: tuple[SumFacts, ...]) -> SumDamage | None:
    """Compare what all ranks know of one sum; None if nothing is wrong."""
    num_ranks = len(facts)
    expected = sum(rank.own_total for rank in facts)
    allowed = num_ranks * _ROUNDING * sum(rank.own_magnitude for rank in facts) + _SMALLEST
    # Not `> allowed`: a total that is NaN is off, too.
    off = [index for index, rank in enumerate(facts) if not abs(rank.total - expected) <= allowed]
    checksums = [rank.checksum for rank in facts]
    if len(set(checksums)) > 1:
        usual = mode(checksums)
        different = [index for index, checksum in enumerate(checksums) if checksum != usual]
        suspects = off if 0 < len(off) < num_ranks else different if num_ranks > 2 else list(range(num_ranks))
        return SumDamage(f"ranks {suspects} received other values than the rest", suspects)
    if off and checksums[0] != _OVERFLOWED:
        return SumDamage("it is not the sum of what the ranks sent", list(range(num_ranks)))
    return None
