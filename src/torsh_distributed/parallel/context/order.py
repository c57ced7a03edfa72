"""Which positions of a sequence each rank has. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from torsh_distributed.errors import TensorShapeMismatch


def chunks_of(length: int, *, rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """Start and stop of the chunks of positions that `rank` of `size` has, in a sequence of `length`.

    Two chunks, one from each end, if the length allows it: under a causal mask later positions attend to more, so
    chunks from both ends give every rank the same work. Otherwise one chunk.
    """
    if length % (2 * size) == 0:
        step = length // (2 * size)
        last = 2 * size - 1 - rank
        return (rank * step, (rank + 1) * step), (last * step, (last + 1) * step)
    if length % size == 0 and length:
        step = length // size
        return ((rank * step, (rank + 1) * step),)
    raise TensorShapeMismatch(
        f"mesh.cp {size}: a sequence of {length} does not split over {size} ranks",
        hint=f"make it a multiple of {2 * size}, which gives all ranks the same work",
        length=length,
    )


def take_positions(tensor: Tensor, dim: int, *, length: int, rank: int, size: int) -> Tensor:
    """A copy of the rank's positions along `dim`; positions beyond `length` are left out."""
    runs = [tensor.narrow(dim, start, stop - start) for start, stop in chunks_of(length, rank=rank, size=size)]
    return torch.cat(runs, dim=dim)


def positions_of(length: int, *, rank: int, size: int) -> Tensor:
    """The rank's positions, in the order it holds them."""
    return take_positions(torch.arange(length), 0, length=length, rank=rank, size=size)
