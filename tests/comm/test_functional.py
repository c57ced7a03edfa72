"""Differentiable collectives: values and gradients, first and second, beside torch.distributed.nn and one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torsh_distributed as td
from tests.bed.world import World
from torsh_distributed.errors import InvalidArgument

pytestmark = pytest.mark.ranks
RANKS = 3


def inputs(rank: int) -> Tensor:
    return torch.randn(RANKS * 2, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def splits(rank: int) -> tuple[list[int], list[int]]:
    """The rows that a rank sends to each rank, and gets from each."""
    sends = [[1, 2, 3], [3, 1, 2], [2, 3, 1]]
    return sends[rank], [sends[source][rank] for source in range(RANKS)]


def alone(name: str) -> list[Callable[[list[Tensor]], Tensor]]:
    """What each rank's output is of all ranks' inputs, in one process."""

    def cut(xs: list[Tensor], source: int, target: int) -> Tensor:
        return xs[source].split(splits(source)[0])[target]

    def of(rank: int) -> Callable[[list[Tensor]], Tensor]:
        return {
            "sum": lambda xs: sum(xs[1:], xs[0]),
            "mean": lambda xs: sum(xs[1:], xs[0]) / RANKS,
            "gather": torch.cat,
            "scatter": lambda xs: sum(xs[1:], xs[0]).chunk(RANKS)[rank],
            "scatter mean": lambda xs: sum(xs[1:], xs[0]).chunk(RANKS)[rank] / RANKS,
            "exchange": lambda xs: torch.cat([cut(xs, source, rank) for source in range(RANKS)]),
            "broadcast": lambda xs: xs[1].clone(),
        }[name]

    return [of(rank) for rank in range(RANKS)]


def ours(name: str, x: Tensor) -> Tensor:
    calls: dict[str, Callable[[], Tensor]] = {
        "sum": lambda: td.functional.all_reduce(x),
        "mean": lambda: td.functional.all_reduce(x, "mean"),
        "gather": lambda: td.functional.all_gather(x),
        "scatter": lambda: td.functional.reduce_scatter(x),
        "scatter mean": lambda: td.functional.reduce_scatter(x, "mean"),
        "exchange": lambda: td.functional.all_to_all(x, *splits(dist.get_rank())),
        "broadcast": lambda: td.functional.broadcast(x, 1),
    }
    return calls[name]()


def loss_of(out: Tensor, rank: int) -> Tensor:
    return (out.sin() * (rank + 1)).sum()


NAMES = ("sum", "mean", "gather", "scatter", "scatter mean", "exchange", "broadcast")


def differentiate() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    found, rank = {}, dist.get_rank()
    for name in NAMES:
        x = inputs(rank).requires_grad_()
        out = ours(name, x)
        [first] = torch.autograd.grad(loss_of(out, rank), x, create_graph=True)
        [second] = torch.autograd.grad(first.square().sum(), x)
        assert torch.equal(x, inputs(rank))  # inputs stay as they are
        found[name] = out.detach(), first.detach(), second
    return found


def test_values_and_both_derivatives_are_those_of_one_process(world: World) -> None:
    found = world.run(differentiate, num_ranks=RANKS, backend="torsh")
    for name in NAMES:
        xs = [inputs(rank).requires_grad_() for rank in range(RANKS)]
        outs = [of(xs) for of in alone(name)]
        loss = sum(loss_of(out, rank) for rank, out in enumerate(outs))
        assert isinstance(loss, Tensor)
        firsts = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
        total = sum(one.square().sum() for one in firsts)
        assert isinstance(total, Tensor)
        seconds = torch.autograd.grad(total, xs, materialize_grads=True)
        for rank in range(RANKS):
            torch.testing.assert_close(
                found[rank][name],
                (outs[rank], firsts[rank], seconds[rank]),
                msg=lambda text, at=(name, rank): f"{at}: {text}",
            )


def like_torch() -> list[tuple[Tensor, Tensor]]:
    from torch.distributed.nn import functional as theirs

    found, rank = [], dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in (
            td.functional.all_reduce,
            theirs.all_reduce,
            td.functional.all_gather,
            lambda x: torch.cat(theirs.all_gather(x)),
        ):
            x = inputs(rank).requires_grad_()
            out = call(x)
            loss_of(out, rank).backward()
            assert x.grad is not None
            found.append((out.detach(), x.grad))
    return found


def test_torchs_own_give_the_same(world: World) -> None:
    for ours_sum, torch_sum, ours_gather, torch_gather in world.run(like_torch, num_ranks=RANKS, backend="gloo"):
        torch.testing.assert_close(ours_sum, torch_sum)
        torch.testing.assert_close(ours_gather, torch_gather)


def largest() -> None:
    td.functional.all_reduce(torch.ones(2), "max")


def test_a_reduction_without_a_gradient_is_refused(world: World) -> None:
    with pytest.raises(InvalidArgument, match="max over ranks has no gradient here"):
        world.run(largest, num_ranks=1)
