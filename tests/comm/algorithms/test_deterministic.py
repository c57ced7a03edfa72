"""Deterministic sums: the same contributions give the same bits, whoever carries them and however often."""

from __future__ import annotations

import functools
import hashlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.world import World
from tests.comm.algorithms.quick import quick_choice
from torsh_distributed.comm.algorithms.pipelined import Pipelined
from torsh_distributed.comm.collectives.packed import scatter_reduce
from torsh_distributed.comm.collectives.reductions import all_reduce

BACKENDS = ["gloo", "shm", "torsh"]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
NUMEL = 10_007
SHORT = (("gloo", 3), ("shm", 2), ("torsh", 3))


def contribution(rank: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different size: any other order of adding gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(NUMEL, generator=generator, dtype=torch.float64)
    scales = 10 ** torch.randint(-3, 4, (NUMEL,), generator=generator)
    return (values * scales).to(dtype)


def bits(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


def in_rank_order(num_ranks: int, dtype: torch.dtype, op: str) -> Tensor:
    parts = [contribution(rank, dtype) for rank in range(num_ranks)]
    fold = torch.mul if op == "product" else torch.add
    total = functools.reduce(fold, parts)
    return total / num_ranks if op == "mean" else total


@quick_choice()
def reduce_all_ways() -> dict[str, set[str]]:
    """The bits found in each case, over ways and repetitions: one, if all is well."""
    me, found = dist.get_rank(), {}
    for dtype in DTYPES:
        for op in ("sum", "mean"):
            seen = set()
            for algorithm in (None, "reduce_scatter_all_gather", "pipelined", Pipelined(num_chunks=3), "auto", None):
                mine = contribution(me, dtype)
                seen.add(bits(all_reduce(mine, op, algorithm=algorithm, deterministic=True)))
            seen.add(bits(all_reduce(contribution(me, dtype), op, deterministic=True, async_op=True).wait()))
            found[f"{dtype} {op}"] = seen
    return found


@pytest.mark.parametrize(
    ("backend", "num_ranks"),
    [
        pytest.param(backend, num_ranks, marks=() if (backend, num_ranks) in SHORT else pytest.mark.matrix)
        for backend in BACKENDS
        for num_ranks in (2, 3, 5)
    ],
)
def test_sums_have_the_bits_of_adding_in_rank_order(world: World, backend: str, num_ranks: int) -> None:
    expected = {
        f"{dtype} {op}": {bits(in_rank_order(num_ranks, dtype, op))} for dtype in DTYPES for op in ("sum", "mean")
    }
    for found in world.run(reduce_all_ways, num_ranks=num_ranks, backend=backend, timeout_s=60):
        assert found == expected


def scattered() -> str:
    shard = scatter_reduce(contribution(dist.get_rank(), torch.float32))
    return bits(shard)


def test_scatter_reduce_adds_in_rank_order_too(world: World) -> None:
    whole = in_rank_order(3, torch.float32, "sum")
    assert world.run(scattered, num_ranks=3) == [bits(shard.clone()) for shard in whole.tensor_split(3)]


def undetermined() -> str:
    return bits(all_reduce(contribution(dist.get_rank(), torch.float32), algorithm="ring"))


def test_the_contributions_tell_orders_apart(world: World) -> None:
    """Without it the tests above could not fail."""
    ring = world.run(undetermined, num_ranks=5)[0]
    assert ring != bits(in_rank_order(5, torch.float32, "sum"))
