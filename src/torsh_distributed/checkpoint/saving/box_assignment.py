"""Who writes which box of which tensor: every box once, and every rank about equally many bytes.

Pure: every rank computes the same from what all ranks hold. Replicas share the work; boxes larger than `MOST_BYTES` are
cut so that they can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torsh_distributed.errors import InternalError
from torsh_distributed.parallel.state.held_tensors import HeldBox, HeldTensor

MOST_BYTES = 32 << 20

BoxKey = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name of the tensor, first index and sizes of the box."""


class TensorClaim(NamedTuple):
    """What a rank says it holds of a tensor."""

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def pieces_of(box: HeldBox, itemsize: int) -> list[HeldBox]:
    """The box in pieces of at most `MOST_BYTES`, cut along its first dims."""
    if box.numel * itemsize <= MOST_BYTES:
        return [box]
    dim = next(number for number, size in enumerate(box.sizes) if size > 1)
    row_bytes = box.numel // box.sizes[dim] * itemsize
    step = max(1, MOST_BYTES // row_bytes)
    found = []
    for start in range(0, box.sizes[dim], step):
        whole, local, sizes = list(box.whole), list(box.local), list(box.sizes)
        whole[dim] += start
        local[dim] += start
        sizes[dim] = min(step, box.sizes[dim] - start)
        found += pieces_of(HeldBox(tuple(whole), tuple(local), tuple(sizes)), itemsize)
    return found


def claims_of(tensors: Sequence[HeldTensor]) -> dict[str, TensorClaim]:
    """What this rank holds, in pieces."""
    return {
        held.name: TensorClaim(
            str(held.dtype).removeprefix("torch."),
            held.dtype.itemsize,
            held.layout.shape,
            tuple(
                (piece.whole, piece.sizes) for box in held.layout.boxes for piece in pieces_of(box, held.dtype.itemsize)
            ),
        )
        for held in tensors
    }


def to_plain(claims: dict[str, TensorClaim]) -> dict[str, Any]:
    """The claims as values that travel between ranks."""
    return {name: [one.dtype, one.itemsize, one.shape, one.boxes] for name, one in claims.items()}


def from_plain(value: dict[str, Any]) -> dict[str, TensorClaim]:
    """The claims of another rank."""
    return {
        name: TensorClaim(dtype, itemsize, tuple(shape), tuple((tuple(at), tuple(sizes)) for at, sizes in boxes))
        for name, (dtype, itemsize, shape, boxes) in value.items()
    }


def assign(claims: Sequence[dict[str, TensorClaim]]) -> list[set[BoxKey]]:
    """The boxes each rank writes; `claims` by rank. InternalError if the boxes do not make up the whole tensors."""
    holders: dict[BoxKey, list[int]] = {}
    bytes_of: dict[BoxKey, int] = {}
    known: dict[str, TensorClaim] = {}
    for rank, held in enumerate(claims):
        for name, claim in held.items():
            first = known.setdefault(name, claim)
            if (first.dtype, first.shape) != (claim.dtype, claim.shape):
                raise InternalError(
                    f"ranks describe {name} differently",
                    first=f"{first.dtype} {first.shape}",
                    rank=rank,
                    other=f"{claim.dtype} {claim.shape}",
                )
            for at, sizes in claim.boxes:
                key = (name, at, sizes)
                holders.setdefault(key, []).append(rank)
                bytes_of[key] = math.prod(sizes) * claim.itemsize
    _require_whole(known, bytes_of)
    loads = [0] * len(claims)
    chosen: list[set[BoxKey]] = [set() for _ in claims]
    for key in sorted(holders, key=lambda key: (-bytes_of[key], key)):
        rank = min(holders[key], key=lambda rank: (loads[rank], rank))
        loads[rank] += bytes_of[key]
        chosen[rank].add(key)
    return chosen


def _require_whole(known: dict[str, TensorClaim], bytes_of: dict[BoxKey, int]) -> None:
    """Boxes of one tensor are equal or disjoint, so their sizes tell whether anything is missing."""
    covered = dict.fromkeys(known, 0)
    for (name, _, _), num_bytes in bytes_of.items():
        covered[name] += num_bytes
    for name, claim in known.items():
        whole = math.prod(claim.shape) * claim.itemsize
        if covered[name] != whole:
            raise InternalError(
                f"the ranks hold {covered[name]} bytes of {name}, which has {whole}",
                hint="please report it with the plan",
                shape=claim.shape,
            )
