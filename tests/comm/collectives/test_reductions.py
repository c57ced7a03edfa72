"""Every reduction against what it must be, computed locally from what every rank is known to hold."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.world import World
from torsh_distributed.comm.collectives.reductions import all_reduce, reduce, reduce_scatter, reduce_scatter_single
from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch

FOLDS = {
    "sum": operator.add,
    "product": operator.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}

SHORT = (("gloo", 1), ("gloo", 3), ("shm", 2), ("torsh", 4))


def held(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank holds: known to all, different on each."""
    generator = torch.Generator().manual_seed(100 + rank)
    values = torch.randint(1, 4, shape, generator=generator)
    return values.to(dtype)


def folded(op: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    parts = [held(rank, shape, dtype) for rank in range(dist.get_world_size())]
    if op == "mean":
        return functools.reduce(operator.add, parts) / len(parts)
    return functools.reduce(FOLDS[op], parts)


def reduce_everything() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        ops = ["sum", "product", "min", "max"] + (["mean"] if dtype.is_floating_point else ["band", "bor", "bxor"])
        for op in ops:
            shape = (size * 2, 3)
            torch.testing.assert_close(all_reduce(held(me, shape, dtype), op), folded(op, shape, dtype))
            rooted = reduce(held(me, shape, dtype), size - 1, op)
            if me == size - 1:
                torch.testing.assert_close(rooted, folded(op, shape, dtype))
            if dtype is not torch.bfloat16 or op != "mean":
                expected = folded(op, shape, dtype)[me * 2 : me * 2 + 2]
                torch.testing.assert_close(reduce_scatter_single(held(me, shape, dtype), op), expected)
                rows = held(me, shape, dtype).split(2)
                torch.testing.assert_close(reduce_scatter(rows, op), expected)


@pytest.mark.parametrize(
    ("backend", "num_ranks"),
    [
        pytest.param(backend, num_ranks, marks=() if (backend, num_ranks) in SHORT else pytest.mark.matrix)
        for backend in ("gloo", "shm", "torsh")
        for num_ranks in (1, 2, 3, 4)
    ],
)
def test_every_reduction_gives_what_it_must(world: World, backend: str, num_ranks: int) -> None:
    world.run(reduce_everything, num_ranks=num_ranks, backend=backend, timeout_s=60)


def scatter_uneven_lists() -> None:
    """The tensor for rank r has r rows; the sum of what all ranks give for it arrives there, now and later."""
    me, size = dist.get_rank(), dist.get_world_size()
    given = [torch.full((rank, 2), float(me * 10 + rank)) for rank in range(size)]
    expected = torch.full((me, 2), float(sum(range(size)) * 10 + me * size))
    assert torch.equal(reduce_scatter(given), expected)
    assert torch.equal(reduce_scatter(given, async_op=True).wait(), expected)
    assert [tensor.unique().tolist() for tensor in given[1:]] == [[me * 10.0 + rank] for rank in range(1, size)]


@pytest.mark.parametrize("backend", ["gloo", "shm", "torsh"])
def test_the_tensors_of_a_list_may_differ_in_shape(world: World, backend: str) -> None:
    world.run(scatter_uneven_lists, num_ranks=3, backend=backend)


def refused(case: str) -> str:
    cases = {
        "mean of integers": lambda: all_reduce(torch.zeros(2, dtype=torch.int32), "mean"),
        "bits of floats": lambda: reduce(torch.zeros(2), 0, "bxor"),
        "unknown": lambda: all_reduce(torch.zeros(2), "median"),
        "rows": lambda: reduce_scatter_single(torch.zeros(3)),
        "a tensor for a list": lambda: reduce_scatter(torch.zeros(2)),  # type: ignore[call-overload]  # the mistake
        "a short list": lambda: reduce_scatter([torch.zeros(2)]),
        "mixed": lambda: reduce_scatter([torch.zeros(2), torch.zeros(2, dtype=torch.int32)]),
    }
    try:
        cases[case]()
    except InvalidArgument as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("mean of integers", InvalidArgument, "mean is not defined for torch.int32"),
        ("bits of floats", InvalidArgument, "bxor is not defined for torch.float32"),
        ("unknown", InvalidArgument, "use one of"),
        ("rows", TensorShapeMismatch, "splits dim 0 evenly over 2 ranks"),
        ("a tensor for a list", InvalidArgument, "call reduce_scatter_single"),
        ("a short list", InvalidArgument, "one tensor for each rank"),
        ("mixed", InvalidArgument, "one dtype on one device"),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(world: World, case: str, kind: type, message: str) -> None:
    for answer in world.run(refused, case):
        assert answer.startswith(kind.__name__)
        assert message in answer


def sum_float8(expects_refusal: bool) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        mine = torch.full((300,), float(dist.get_rank() + 1)).to(dtype)
        if expects_refusal:
            with pytest.raises(InvalidArgument, match=r"gloo has no all_reduce(.|\n)*shm or torsh"):
                all_reduce(mine)
        else:
            assert all_reduce(mine).float().unique().tolist() == [6.0]
    assert all_reduce(torch.ones(2)).tolist() == [3.0, 3.0], "nothing was sent, so the group goes on"


@pytest.mark.parametrize("backend", ["gloo", "shm", "torsh"])
def test_float8_is_summed_or_refused_by_name(world: World, backend: str) -> None:
    world.run(sum_float8, backend == "gloo", num_ranks=3, backend=backend)
