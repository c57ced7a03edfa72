"""Hot experts on several ranks: the owner lends its weights for one forward and gets their gradients back.

Why lend instead of replicate: the owner keeps the only parameters and optimizer state. Nothing has to be kept equal,
saved or moved; the layer's results do not change, and lending can start or stop between any two steps.

Every rank computes who borrows what, and how a batch is divided, from counts that all have: no extra communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import override

from torsh_distributed.comm.collectives.moves import all_to_all_single
from torsh_distributed.parallel.expert.balancing.placement import Placement

Stacks = dict[str, Tensor]
"""Expert weights by parameter name; each has one entry for each expert."""

COPY_ROWS = {"cpu": 64, "cuda": 2048}
"""Rows that a rank computes, forward and backward, in the time it takes to send an expert's weights one way and their
gradients back. Both times are proportional to the size of the expert, so only the machine counts: operations per
second × bytes of a weight / (3 × bytes sent per second). Measured on one node: 22 to 30 over shared memory, 38 to 61
over gloo; computed for GPUs from 600 TFLOP/s and 200 GB/s."""


@dataclass(frozen=True)
class Lending:
    """Which experts of other ranks each rank computes too."""

    placement: Placement
    borrowed: tuple[tuple[int, ...], ...]
    """By rank: the experts it borrows, in slot order, which is the order they arrive in."""

    def experts_on(self, rank: int) -> tuple[int, ...]:
        """The experts a rank computes, by place: its own, then the borrowed ones."""
        return self.placement.experts_of(rank) + self.borrowed[rank]

    @cached_property
    def places(self) -> list[dict[int, int]]:
        """By expert: the ranks that compute it, its owner first, and its place on each."""
        owners = [slot // self.placement.per_rank for slot in self.placement.slot_of_expert]
        places: list[dict[int, int]] = [{owner: 0} for owner in owners]
        for rank in range(self.placement.num_ranks):
            for place, expert in enumerate(self.experts_on(rank)):
                places[expert][rank] = place
        return places

    @cached_property
    def lent(self) -> frozenset[int]:
        """The experts that more than one rank computes."""
        return frozenset(expert for some in self.borrowed for expert in some)

    def with_copy(self, expert: int, rank: int) -> Lending:
        """This lending, with `expert` also borrowed by `rank`."""
        more = tuple(sorted((*self.borrowed[rank], expert), key=self.placement.slot_of_expert.__getitem__))
        return Lending(self.placement, (*self.borrowed[:rank], more, *self.borrowed[rank + 1 :]))

    def shares(self, rows: Sequence[int]) -> list[dict[int, int]]:
        """By expert: how many of its rows each of its ranks computes, so ranks are evenly loaded. rows: by expert.

        Experts on one rank are counted first; then lent experts, most rows first, fill up their ranks.
        """
        shares = [{next(iter(places)): count} for places, count in zip(self.places, rows, strict=True)]
        filled = [0] * self.placement.num_ranks
        for expert, places in enumerate(self.places):
            filled[next(iter(places))] += 0 if expert in self.lent else rows[expert]
        for expert in sorted(self.lent, key=lambda expert: (-rows[expert], expert)):
            shares[expert] = _fill_evenly(rows[expert], {rank: filled[rank] for rank in self.places[expert]})
            for rank, count in shares[expert].items():
                filled[rank] += count
        return shares

    def rank_rows(self, rows: Sequence[int]) -> list[int]:
        """How many rows each rank computes. rows: by expert."""
        shares = self.shares(rows)
        return [sum(some.get(rank, 0) for some in shares) for rank in range(self.placement.num_ranks)]

    def divide(self, sends: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """By source, rank and place on it: the rows sent. sends: by source rank and expert.

        A rank computes rows of its own tokens first: these need not be sent.
        """
        ranks = range(self.placement.num_ranks)
        on = [self.experts_on(rank) for rank in ranks]
        divided = [[[row[expert] for expert in on[rank]] for rank in ranks] for row in sends]
        all_shares = self.shares([sum(column) for column in zip(*sends, strict=True)])
        for expert in self.lent:
            places, left, wanted = self.places[expert], all_shares[expert], [row[expert] for row in sends]
            for source, (rank, place) in product(ranks, places.items()):
                divided[source][rank][place] = 0
            at_home = [(rank, rank) for rank in places]
            for source, rank in [*at_home, *product(ranks, places)]:
                count = min(wanted[source], left[rank])
                divided[source][rank][places[rank]] += count
                wanted[source] -= count
                left[rank] -= count
        return divided

    def reorder(self, order: Tensor, mine: Sequence[Sequence[int]]) -> Tensor:
        """Choices sorted by slot, put in the order of sending: by rank, then by place on it.

        mine: by rank and place, the rows this rank sends, from `divide`.
        """
        by_slot = [where for expert in self.placement.expert_of_slot for where in self.places[expert].items()]
        pieces = torch.split(order, [mine[rank][place] for rank, place in by_slot])
        sent = dict(zip(by_slot, pieces, strict=True))
        return torch.cat([sent[where] for where in sorted(sent)])


def worth_lending(placement: Placement, rows: Sequence[int], *, most: int, copy_rows: int) -> Lending | None:
    """What to lend, or None. rows: by expert, of one forward; `most`: the most copies that a rank takes.

    A copy costs its owner and its borrower the time of `copy_rows` rows each, forward and backward. As long as it
    helps, the expert with most rows on the busiest rank, own or borrowed, is lent to the least busy rank.
    """

    def busy(lending: Lending) -> list[int]:
        copies = [len(some) for some in lending.borrowed]
        for expert in (expert for some in lending.borrowed for expert in some):
            copies[placement.owner_of(expert)] += 1
        return [count + copy_rows * num for count, num in zip(lending.rank_rows(rows), copies, strict=True)]

    lending = nothing = Lending(placement, ((),) * placement.num_ranks)
    while True:
        now = busy(lending)
        busiest = now.index(max(now))
        here = {expert: share.get(busiest, 0) for expert, share in enumerate(lending.shares(rows))}
        expert = max(lending.experts_on(busiest), key=here.__getitem__)
        takers = [
            rank
            for rank, some in enumerate(lending.borrowed)
            if len(some) < most and rank not in lending.places[expert]
        ]
        if not takers:
            break
        longer = lending.with_copy(expert, min(takers, key=now.__getitem__))
        # Compare all ranks from the busiest down: of two equally busy ones, one has to be relieved first.
        if sorted(busy(longer), reverse=True) >= sorted(now, reverse=True):
            break
        lending = longer
    return lending if max(busy(lending)) < max(busy(nothing)) else None


def lend(stacks: Stacks, lending: Lending, group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[Stacks, Stacks]:
    """This rank's experts, to use instead of `stacks`, and those it borrows, in `dtype`.

    Every rank of the group calls this, forward and backward; backward adds the gradients of copies to the owner's.
    Both results come from one autograd node, so a rank that borrows nothing takes part in backward too. Nodes run
    backward in reverse order of creation, so all ranks reach it between the same two exchanges of tokens. Gradients
    of own experts are changed in place, which is safe because products return new tensors.
    """
    me, placement = group.rank(), lending.placement
    mine = placement.experts_of(me)
    away = [[place for place, expert in enumerate(mine) if expert in some] for some in lending.borrowed]
    receive = [0] * group.size()
    for expert in lending.borrowed[me]:
        receive[placement.owner_of(expert)] += 1
    lent = _Lend.apply(away, receive, group, dtype, *stacks.values())  # type: ignore[no-untyped-call]  # in torch
    *own, flat = lent
    parts = torch.split(flat, [stack[0].numel() for stack in own], dim=1)
    shaped = [part.view(-1, *stack.shape[1:]) for part, stack in zip(parts, own, strict=True)]
    return dict(zip(stacks, own, strict=True)), dict(zip(stacks, shaped, strict=True))


class _Lend(Function):
    """Returns the stacks unchanged, and (borrowed, weights of an expert) the experts received, one row each."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        away: list[list[int]],
        receive: list[int],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        *stacks: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.away, ctx.receive, ctx.group = away, receive, group
        weights = [stack[place].flatten() for some in away for place in some for stack in stacks]
        rows = (
            torch.cat([stacks[0].new_empty(0), *weights]).to(dtype).view(-1, sum(stack[0].numel() for stack in stacks))
        )
        arrived = all_to_all_single(rows, [len(some) for some in away], receive, group=group)
        return *(stack.view_as(stack) for stack in stacks), arrived

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *own, flat = grads
        home = all_to_all_single(flat.contiguous(), ctx.receive, [len(some) for some in ctx.away], group=ctx.group)
        places = [place for some in ctx.away for place in some]
        for grad, part in zip(own, torch.split(home, [grad[0].numel() for grad in own], dim=1), strict=True):
            for place, row in zip(places, part, strict=True):
                grad[place] += row.view_as(grad[place])  # not index_add_: on a GPU its order varies
        return None, None, None, None, *own


def _fill_evenly(total: int, levels: dict[int, int]) -> dict[int, int]:
    """How much of `total` each rank gets so the highest level is as low as possible; the lowest get the remainder."""
    order = sorted(levels, key=lambda rank: (levels[rank], rank))
    while True:
        level, rest = divmod(total + sum(levels[rank] for rank in order), len(order))
        if level >= levels[order[-1]]:
            break
        order.pop()
    given = {rank: level - levels[rank] + (number < rest) for number, rank in enumerate(order)}
    return {rank: given.get(rank, 0) for rank in levels}
