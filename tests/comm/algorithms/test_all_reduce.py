"""Every algorithm against the fold computed locally from what every rank is known to hold."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from _pytest.mark import ParameterSet
from torch import Tensor
from torch.distributed import distributed_c10d

from tests.bed.world import World
from tests.comm.algorithms.quick import quick_choice
from torsh_distributed import events
from torsh_distributed.comm.algorithms.base import Algorithm
from torsh_distributed.comm.algorithms.hierarchical import Hierarchical
from torsh_distributed.comm.algorithms.pipelined import Pipelined
from torsh_distributed.comm.algorithms.registry import ALGORITHMS
from torsh_distributed.comm.collectives.point_to_point import irecv, isend
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import InvalidArgument, OperationTimeout

BACKENDS = ["gloo", "shm"]
FOLDS = {
    "sum": operator.add,
    "product": operator.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2)
BASIC = ("sum", "product", "min", "max")
OPS: dict[torch.dtype, tuple[str, ...]] = {
    **dict.fromkeys(INTEGERS, (*BASIC, "band", "bor", "bxor")),
    torch.bool: (*BASIC, "band", "bor", "bxor"),
    **dict.fromkeys(FLOATS, (*BASIC, "mean")),
    **dict.fromkeys((torch.complex64, torch.complex128), ("sum", "product", "mean")),
}


def worlds(most: int, *, short: list[tuple[str, int]]) -> list[ParameterSet]:
    """Every backend with 1 to `most` ranks; those not in `short` are for the long form."""
    every = [(backend, num_ranks) for backend in BACKENDS for num_ranks in range(1, most + 1)]
    return [pytest.param(*one, marks=() if one in short else pytest.mark.matrix) for one in every]


def held(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What a rank holds: known to all, different on each, with the top bit of unsigned numbers in use."""
    generator = torch.Generator().manual_seed(100 + rank)
    values = torch.randint(0, 4, (numel,), generator=generator)
    if dtype in INTEGERS and not dtype.is_signed:
        values = values - 2  # wraps around to the largest ones
    return values.to(dtype)


def folded(parts: list[Tensor], op: str) -> Tensor:
    """In wide numbers, then in the dtype asked for: exact for integers, which wrap around."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        return functools.reduce(FOLDS[{"sum": "bor", "product": "band"}.get(op, op)], parts)
    if dtype == torch.uint64:  # torch has no wider type: Python has
        fold = {**FOLDS, "min": min, "max": max}[op]
        values = [functools.reduce(fold, column) % 2**64 for column in zip(*(p.tolist() for p in parts), strict=True)]
        return torch.tensor(values, dtype=dtype)
    wide = torch.int64 if dtype in INTEGERS else torch.complex128 if dtype.is_complex else torch.float64
    widened = [part.to(wide) for part in parts]
    if op == "mean":
        return (functools.reduce(operator.add, widened) / len(parts)).to(dtype)
    return functools.reduce(FOLDS[op], widened).to(dtype)


@functools.cache
def expected_of(num_ranks: int, numel: int, dtype: torch.dtype, op: str) -> Tensor:
    """The same for every algorithm."""
    return folded([held(rank, numel, dtype) for rank in range(num_ranks)], op)


def variants(num_ranks: int) -> list[str | Algorithm]:
    """All names and, of those that take arguments, some arguments. Which nodes there are is not known here."""
    names = [name for name in ALGORITHMS if name != "hierarchical"]
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    return [*names, Pipelined(num_chunks=5), *[Hierarchical(ranks_per_node=size) for size in sizes]]


def check(algorithm: str | Algorithm, numel: int, dtype: torch.dtype, op: str) -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    tensor = held(me, numel, dtype)
    result = all_reduce(tensor, op, algorithm=algorithm)
    assert result is tensor
    expected = expected_of(size, numel, dtype, op)
    message = f"{algorithm} {dtype} {op} {numel} over {size}"
    if dtype in INTEGERS or dtype == torch.bool:
        assert result.tolist() == expected.tolist(), message
    else:
        # A product of eight fp8 or bf16 numbers is rounded seven times.
        tolerance = {torch.float8_e5m2: 0.5, torch.bfloat16: 0.05, torch.float16: 5e-3}.get(dtype, 1e-5)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        torch.testing.assert_close(
            result.to(wide), expected.to(wide), rtol=tolerance, atol=tolerance, msg=lambda text: f"{message}: {text}"
        )


def reduce_everything() -> None:
    size = dist.get_world_size()
    names = [name for name in ALGORITHMS if name != "hierarchical"]
    for algorithm in (*names, Hierarchical(ranks_per_node=size // 2 if size % 2 == 0 else 1)):
        for dtype, ops in OPS.items():
            for op in ops:
                check(algorithm, 17, dtype, op)


def reduce_all_sizes() -> None:
    for algorithm in variants(dist.get_world_size()):
        for numel in (0, 1, 2, 7, 1000):
            check(algorithm, numel, torch.float32, "mean")
            check(algorithm, numel, torch.int64, "sum")


@pytest.mark.parametrize(("backend", "num_ranks"), worlds(4, short=[("gloo", 3), ("shm", 2)]))
def test_every_algorithm_dtype_and_reduction_gives_what_it_must(world: World, backend: str, num_ranks: int) -> None:
    world.run(reduce_everything, num_ranks=num_ranks, backend=backend, timeout_s=100)


@pytest.mark.parametrize(("backend", "num_ranks"), worlds(8, short=[("gloo", 1), ("gloo", 5), ("shm", 4)]))
def test_sizes_need_not_divide_and_ranks_need_not_be_a_power_of_two(world: World, backend: str, num_ranks: int) -> None:
    world.run(reduce_all_sizes, num_ranks=num_ranks, backend=backend, timeout_s=100)


@quick_choice()
def large_floats() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    parts = [torch.randn(300_001, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    expected = torch.stack(parts).double().sum(dim=0).float()
    for algorithm in (*variants(size), "auto"):
        torch.testing.assert_close(all_reduce(parts[me].clone(), algorithm=algorithm), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_buffers_are_summed_within_the_tolerance_of_their_dtype(world: World, backend: str) -> None:
    world.run(large_floats, num_ranks=3, backend=backend)


def awkward_bits() -> list[bytes]:
    """What comes out, as bytes, where the order of two operands shows: zeros of both signs, complex products."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    zeros = torch.zeros(64) * torch.randn(64, generator=generator)
    turned = torch.randn(64, dtype=torch.complex64, generator=generator)
    return [
        all_reduce(tensor.clone(), op, algorithm=algorithm).view(torch.uint8).numpy().tobytes()
        for algorithm in variants(dist.get_world_size())
        for tensor, op in ((zeros, "min"), (zeros, "max"), (turned, "product"), (turned, "sum"))
    ]


def test_all_ranks_get_the_same_bits(world: World) -> None:
    """Replicas that differ in one bit drift apart."""
    first, *others = world.run(awkward_bits, num_ranks=3)
    assert others == [first] * 2


def odd_layouts() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    total = sum(range(size))
    for algorithm in variants(size):
        strided = (torch.arange(12.0).view(3, 4) * 0 + me).t()
        assert all_reduce(strided, algorithm=algorithm).tolist() == [[total] * 3] * 4
        single = torch.tensor(float(me))
        assert all_reduce(single, algorithm=algorithm).item() == total
        leaf = torch.full((3,), float(me), requires_grad=True)
        assert all_reduce(leaf, algorithm=algorithm).tolist() == [total] * 3
    group = dist.new_group([size - 1, 0])
    if me in (0, size - 1):
        for algorithm in (name for name in ALGORITHMS if name != "hierarchical"):
            assert all_reduce(torch.tensor(float(me)), algorithm=algorithm, group=group).item() == size - 1


def test_any_layout_and_any_group_will_do(world: World) -> None:
    world.run(odd_layouts, num_ranks=3)


def overlapping() -> None:
    """Operations on their way, others of every kind beside them: none takes another's messages."""
    me, size = dist.get_rank(), dist.get_world_size()
    after, before = (me + 1) % size, (me - 1) % size
    names = [name for name in ALGORITHMS if name != "hierarchical"]
    works = [
        all_reduce(torch.full((5000,), float(me + number)), algorithm=names[number % len(names)], async_op=True)
        for number in range(10)
    ]
    message = torch.zeros(5000)
    sent, received = isend(torch.full((5000,), float(me)), after), irecv(message, before)
    assert all_reduce(torch.full((5000,), float(me)), algorithm="ring").unique().tolist() == [sum(range(size))]
    assert all_reduce(torch.full((5000,), float(me))).unique().tolist() == [sum(range(size))]
    for number, work in enumerate(works):
        assert work.wait(timeout_s=20).unique().tolist() == [sum(range(size)) + number * size]
        assert work.is_completed()
    sent.wait()
    received.wait()
    assert message.unique().tolist() == [before]
    future = all_reduce(torch.full((7,), float(me)), algorithm="tree", async_op=True).get_future()
    assert future.wait().tolist() == [sum(range(size))] * 7


@pytest.mark.parametrize("backend", BACKENDS)
def test_asynchronous_operations_overlap_without_taking_each_others_messages(world: World, backend: str) -> None:
    world.run(overlapping, num_ranks=3, backend=backend)


def on_nodes(nodes: list[str]) -> list[float]:
    rank = int(os.environ["RANK"])
    process_group.start_world(
        "gloo",
        rank=rank,
        world_size=len(nodes),
        master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]),
        timeout_s=20,
        node=nodes[rank],
    )
    found = all_reduce(torch.arange(7.0) + rank, "mean", algorithm="hierarchical").tolist()
    process_group.destroy_process_group()
    return found


@pytest.mark.parametrize(
    "nodes", ["aaab", "abab", *(pytest.param(nodes, marks=pytest.mark.matrix) for nodes in ("aabb", "abc", "aaa"))]
)
def test_nodes_may_be_uneven_and_interleaved(world: World, nodes: str) -> None:
    expected = [value + (len(nodes) - 1) / 2 for value in range(7)]
    for found in world.run(on_nodes, list(nodes), num_ranks=len(nodes), backend=None):
        assert found == pytest.approx(expected)


def refused() -> list[str]:
    """What each mistake gets, on this rank."""
    mistakes: list[Callable[[], object]] = [
        lambda: all_reduce(torch.zeros(1), algorithm="bogus"),
        lambda: all_reduce(torch.zeros(1), algorithm="fused"),
        lambda: all_reduce(torch.zeros(1), algorithm=Hierarchical(ranks_per_node=2)),
        lambda: all_reduce(torch.zeros(1), algorithm=Pipelined(num_chunks=0)),
        lambda: all_reduce(torch.zeros(1), algorithm="ring", deterministic=True),
        lambda: all_reduce(torch.eye(2).to_sparse(), algorithm="ring"),
        lambda: all_reduce(torch.zeros(1, device="meta"), deterministic=True),
        lambda: all_reduce(torch.zeros(1), "bxor", algorithm="ring"),
    ]
    said = []
    for mistake in mistakes:
        with pytest.raises(InvalidArgument) as caught:
            mistake()
        said.append(str(caught.value))
    return said


def test_mistakes_are_refused_on_every_rank(world: World) -> None:
    for said in world.run(refused, num_ranks=3):
        for message, words in zip(
            said,
            [
                "use one of: auto, ring, tree",
                "call fused_all_reduce(tensors)",
                "2 ranks per node do not divide the group of 3",
                "num_chunks must be at least 1",
                "use one of: auto, reduce_scatter_all_gather, pipelined",
                "for dense CPU tensors",
                "for dense CPU tensors",
                "bxor is not defined for torch.float32",
            ],
            strict=True,
        ):
            assert words in message


def one_rank_comes_late(how: str) -> None:
    store = distributed_c10d._get_default_store()
    if dist.get_rank() == 2:
        # Busy elsewhere, past the others' deadline and their roll call.
        store.wait(["given up/0", "given up/1"], timedelta(seconds=20))
        return
    try:
        if how == "wait":
            all_reduce(torch.zeros(1000), algorithm="ring", timeout_s=1.0)
        else:
            work = all_reduce(torch.zeros(1000), algorithm="ring", timeout_s=1.0, async_op=True)
            with pytest.raises(Exception, match=r"all_reduce:ring did not end within 1 s; missing: ranks 2"):
                work.get_future().wait()
            work.wait()
    finally:
        store.set(f"given up/{dist.get_rank()}", "")


@pytest.mark.parametrize("how", ["wait", "future"])
def test_a_deadline_names_the_ranks_that_did_not_come(world: World, how: str) -> None:
    for outcome in world.outcomes(one_rank_comes_late, how, num_ranks=3)[:2]:
        assert isinstance(outcome.error, OperationTimeout), outcome
        assert outcome.error.context["missing_ranks"] == [2]
        assert outcome.error.operation == "all_reduce:ring"


def recorded() -> list[tuple[str, int]]:
    seen: list[events.Event] = []
    end = events.subscribe(seen.append, events.CollectiveEvent)
    all_reduce(torch.zeros(4), algorithm="ring")
    all_reduce(torch.zeros(2), deterministic=True, async_op=True).wait()
    end()
    return [(event.op, event.num_bytes) for event in seen if isinstance(event, events.CollectiveEvent)]


def test_each_is_one_event_that_names_the_algorithm(world: World) -> None:
    expected = [("all_reduce:ring", 16), ("all_reduce:reduce_scatter_all_gather", 8)]
    assert world.run(recorded) == [expected] * 2
