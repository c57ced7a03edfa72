"""Moves tensors that are spread over the ranks of a group to one rank each, whole, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.moves import all_to_all_single
from torsh_distributed.parallel.state.held_tensors import HeldBox, WholeLayout


@dataclass(frozen=True)
class SpreadTensor:
    """A tensor of which each rank of a group holds a part, and the rank that gets it whole."""

    layouts: tuple[WholeLayout, ...]
    """By rank of the group."""
    owner: int
    """A rank of the group."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.layouts[0].shape

    @property
    def is_covered(self) -> bool:
        """Whether the ranks together hold every element."""
        boxes = {(box.whole, box.sizes): box.numel for layout in self.layouts for box in layout.boxes}
        return sum(boxes.values()) == math.prod(self.shape)

    @property
    def is_whole_at_owner(self) -> bool:
        """Whether the owner holds all of it anyway."""
        return not any(self.missing)

    @cached_property
    def missing(self) -> tuple[tuple[HeldBox, ...], ...]:
        """By rank, the boxes that the owner gets from it: each from the first rank that holds it, none it has."""
        seen = {(box.whole, box.sizes) for box in self.layouts[self.owner].boxes}
        found = []
        for layout in self.layouts:
            new = tuple(box for box in layout.boxes if (box.whole, box.sizes) not in seen)
            seen |= {(box.whole, box.sizes) for box in new}
            found.append(new)
        return tuple(found)


@torch.no_grad()
def collect(tensors: Sequence[SpreadTensor], held: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor | None]:
    """Each tensor whole on its owner, None elsewhere; `held` is what this rank has of each, all of one dtype.

    Every rank of the group calls this with the same tensors. What an owner holds whole anyway is not copied.
    """
    me = group.rank()
    wholes = [_at_owner(one, local) if one.owner == me else None for one, local in zip(tensors, held, strict=True)]
    sent: list[list[Tensor]] = [[] for _ in range(group.size())]
    received: list[list[Tensor]] = [[] for _ in range(group.size())]
    for one, local, whole in zip(tensors, held, wholes, strict=True):
        sent[one.owner] += [box.of(local) for box in one.missing[me]]
        if whole is not None:
            for rank, boxes in enumerate(one.missing):
                received[rank] += [box.of_whole(whole) for box in boxes]
    if not all(one.is_whole_at_owner for one in tensors):
        _exchange(sent, received, held[0], group)
    return wholes


@torch.no_grad()
def give_back(
    tensors: Sequence[SpreadTensor],
    wholes: Sequence[Tensor | None],
    held: Sequence[Tensor],
    group: dist.ProcessGroup,
) -> None:
    """Write what the owners have into `held` on every rank, in place; every rank calls this with the same tensors."""
    me = group.rank()
    sent: list[list[Tensor]] = [[] for _ in range(group.size())]
    received: list[list[Tensor]] = [[] for _ in range(group.size())]
    for one, local, whole in zip(tensors, held, wholes, strict=True):
        if whole is None:
            received[one.owner] += [box.of(local) for box in one.layouts[me].boxes]
            continue
        if not one.is_whole_at_owner:
            for box in one.layouts[me].boxes:
                box.of(local).copy_(box.of_whole(whole))
        for rank, layout in enumerate(one.layouts):
            if rank != me:
                sent[rank] += [box.of_whole(whole) for box in layout.boxes]
    _exchange(sent, received, held[0], group)


def _at_owner(one: SpreadTensor, local: Tensor) -> Tensor:
    """The tensor with the owner's own boxes in it; `local` itself if that is all of it."""
    if one.is_whole_at_owner:
        return local
    whole = local.new_empty(one.shape)
    for box in one.layouts[one.owner].boxes:
        box.of_whole(whole).copy_(box.of(local))
    return whole


def _exchange(
    sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], like: Tensor, group: dist.ProcessGroup
) -> None:
    """Send tensors to each rank, and fill those of `received`, views, with what each rank sends."""
    flat = [part.reshape(-1) for parts in sent for part in parts]
    answer = all_to_all_single(
        torch.cat(flat) if flat else like.new_empty(0),
        [sum(part.numel() for part in parts) for parts in sent],
        [sum(part.numel() for part in parts) for parts in received],
        group=group,
    )
    targets = [part for parts in received for part in parts]
    for target, values in zip(targets, torch.split(answer, [part.numel() for part in targets]), strict=True):
        target.copy_(values.view(target.shape))
