"""Whole tensors out of flat buffers: where the elements of each parameter are, by ZeRO stage. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torsh_distributed.errors import CheckpointError

Shapes = Mapping[str, Sequence[int]]


class FlatPiece(NamedTuple):
    """Elements `start` to `start + numel` of the flat buffer of data-parallel rank `rank`."""

    rank: int
    start: int
    numel: int


def pieces_by_group(shapes: Shapes, paddings: Sequence[int] | None, partition_numel: int) -> dict[str, list[FlatPiece]]:
    """Stages 1 and 2: the parameters of a group in one flat vector, cut into equal partitions, one for each rank.

    `paddings`: elements after each parameter that belong to none.
    """
    found: dict[str, list[FlatPiece]] = {}
    at = 0
    for number, (name, shape) in enumerate(shapes.items()):
        numel = math.prod(shape)
        found[name] = _cut(at, numel, partition_numel)
        at += numel + (paddings[number] if paddings else 0)
    return found


def pieces_by_param(shapes: Shapes, num_ranks: int) -> dict[str, list[FlatPiece]]:
    """Stage 3: each parameter cut into equal parts, one for each rank; a rank's parts of all parameters in a row."""
    found: dict[str, list[FlatPiece]] = {}
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = math.ceil(numel / num_ranks)
        held = [min(part, max(0, numel - rank * part)) for rank in range(num_ranks)]
        found[name] = [FlatPiece(rank, at, count) for rank, count in enumerate(held) if count]
        at += part
    return found


def put_together(shape: Sequence[int], pieces: Sequence[FlatPiece], flats: Sequence[Tensor], name: str) -> Tensor:
    """The whole tensor; a view of the file where it is one piece. Raises CheckpointError if a buffer is too short."""
    parts = []
    for piece in pieces:
        flat = flats[piece.rank]
        if piece.start + piece.numel > flat.numel():
            raise CheckpointError(
                f"the shard of data-parallel rank {piece.rank} ends before {name}: it has {flat.numel()} elements of"
                f" at least {piece.start + piece.numel}",
                hint="the files are of different saves, or one is damaged: copy the directory again",
            )
        parts.append(flat.narrow(0, piece.start, piece.numel))
    if not parts:
        return torch.empty(tuple(shape))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(tuple(shape))


def _cut(at: int, numel: int, partition_numel: int) -> list[FlatPiece]:
    found = []
    while numel > 0:
        rank, start = divmod(at, partition_numel)
        count = min(numel, partition_numel - start)
        found.append(FlatPiece(rank, start, count))
        at, numel = at + count, numel - count
    return found
