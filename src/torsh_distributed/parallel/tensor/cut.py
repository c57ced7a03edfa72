"""Cuts a tensor along one dim into pieces, one for each rank of an axis. Pure: no process, no group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torsh_distributed.errors import InvalidArgument


@dataclass(frozen=True)
class TensorCut:
    """A cut along `dim`, like torch.chunk: the last pieces may be smaller, or empty.

    With `sections` the dim holds several adjacent matrices, such as query, key and value in one linear layer: every
    rank gets its piece of each.
    """

    dim: int
    sections: tuple[int, ...] = ()

    def part(self, whole: Tensor, *, rank: int, size: int) -> Tensor:
        """The piece of `rank` among `size`, a copy."""
        pieces = [_chunk(section, self.dim, rank, size) for section in self._sections_of(whole)]
        return torch.cat(pieces, dim=self.dim).contiguous()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the pieces of all ranks, in order."""
        if not self.sections:
            return torch.cat(list(parts), dim=self.dim)
        size = len(parts)
        cuts = [
            torch.split(part, [_chunk_length(length, rank, size) for length in self.sections], dim=self.dim)
            for rank, part in enumerate(parts)
        ]
        return torch.cat([torch.cat(pieces, dim=self.dim) for pieces in zip(*cuts, strict=True)], dim=self.dim)

    def runs(self, whole: int, *, rank: int, size: int) -> list[tuple[int, int, int]]:
        """The rank's piece of a dim of length `whole`: (start in the whole, start in the piece, length) of each run."""
        found, before, held = [], 0, 0
        for section in self.sections or (whole,):
            start, stop = bounds(section, rank=rank, size=size)
            if stop > start:
                found.append((before + start, held, stop - start))
            before, held = before + section, held + stop - start
        return found

    def length(self, whole: int, *, rank: int, size: int) -> int:
        """How much of a dim of length `whole` the rank keeps."""
        return sum(_chunk_length(length, rank, size) for length in self.sections or (whole,))

    def shape(self, whole: Sequence[int], *, rank: int, size: int) -> tuple[int, ...]:
        """The shape of the piece of a tensor of shape `whole`."""
        out = list(whole)
        out[self.dim] = self.length(out[self.dim], rank=rank, size=size)
        return tuple(out)

    def _sections_of(self, whole: Tensor) -> Sequence[Tensor]:
        if not self.sections:
            return (whole,)
        if sum(self.sections) != whole.shape[self.dim]:
            raise InvalidArgument(
                f"sections {self.sections} do not add up to dim {self.dim} of the tensor",
                hint="give the length of every matrix in the fused layer",
                shape=tuple(whole.shape),
            )
        return torch.split(whole, list(self.sections), dim=self.dim)


def bounds(whole: int, *, rank: int, size: int) -> tuple[int, int]:
    """Start and stop of a rank's piece of a dim of length `whole`."""
    step = -(-whole // size)
    return min(rank * step, whole), min((rank + 1) * step, whole)


def _chunk(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    start, stop = bounds(tensor.shape[dim], rank=rank, size=size)
    return tensor.narrow(dim, start, stop - start)


def _chunk_length(whole: int, rank: int, size: int) -> int:
    start, stop = bounds(whole, rank=rank, size=size)
    return stop - start
