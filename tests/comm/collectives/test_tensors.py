"""Every collective against what it must be, computed locally from what every rank is known to hold."""

from __future__ import annotations

import functools
import operator
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torsh_distributed as td
from tests.bed.world import World
from torsh_distributed.comm.collectives import objects, point_to_point
from torsh_distributed.comm.collectives import tensors as c
from torsh_distributed.comm.measurement.flight_recorder import recorder
from torsh_distributed.errors import (
    BackendNotInitialized,
    InvalidArgument,
    OperationTimeout,
    RankOutOfBounds,
    SerializationError,
    TensorShapeMismatch,
    TorshError,
)

BACKENDS = ["gloo", "shm", "torsh"]
FOLDS = {
    "sum": operator.add,
    "product": operator.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}


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
            torch.testing.assert_close(c.all_reduce(held(me, shape, dtype), op), folded(op, shape, dtype))
            rooted = c.reduce(held(me, shape, dtype), size - 1, op)
            if me == size - 1:
                torch.testing.assert_close(rooted, folded(op, shape, dtype))
            if dtype is not torch.bfloat16 or op != "mean":
                part = c.reduce_scatter(held(me, shape, dtype), op)
                torch.testing.assert_close(part, folded(op, shape, dtype)[me * 2 : me * 2 + 2])


def move_everything() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    for shape in ((4, 3), (), (0, 2)):
        everyone = [held(rank, shape, torch.float32) for rank in range(size)]
        assert all(map(torch.equal, c.all_gather(everyone[me]), everyone))
        for root in {0, size - 1}:
            assert torch.equal(c.broadcast(everyone[me].clone(), root), everyone[root])
            gathered = c.gather(everyone[me], root)
            assert (gathered is None) == (me != root)
            assert gathered is None or all(map(torch.equal, gathered, everyone))
            given = [part * 2 for part in everyone] if me == root else None
            assert torch.equal(c.scatter(torch.empty(shape), root, given), everyone[me] * 2)
    even = held(me, (size, 2), torch.int32)
    expected = torch.stack([held(rank, (size, 2), torch.int32)[me] for rank in range(size)])
    assert torch.equal(c.all_to_all(even), expected)
    # Rank r sends (r + d) % 3 rows to rank d, all holding r * 10 + d.
    sent = [(me + dst) % 3 for dst in range(size)]
    taken = [(src + me) % 3 for src in range(size)]
    rows = torch.cat([torch.full((count,), me * 10 + dst) for dst, count in enumerate(sent)])
    expected = torch.cat([torch.full((count,), src * 10 + me) for src, count in enumerate(taken)])
    assert torch.equal(c.all_to_all(rows, sent, taken), expected)
    strided = held(me, (3, 4), torch.float32).t()
    assert torch.equal(c.all_gather(strided)[size - 1], held(size - 1, (3, 4), torch.float32).t())
    uneven = objects.all_gather_varsize(torch.full((me, 2), float(me)))
    assert [tuple(part.shape) for part in uneven] == [(rank, 2) for rank in range(size)]
    assert all((part == rank).all() for rank, part in enumerate(uneven))


def send_in_a_ring() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    after, before = (me + 1) % size, (me - 1) % size
    outgoing = [point_to_point.isend(torch.full((3,), me * 10.0 + tag), after, tag=tag) for tag in (1, 2)]
    target = torch.zeros(3, 2)
    assert point_to_point.recv(target[:, 1], before, tag=2) == before
    assert point_to_point.recv(target[:, 0], before, tag=1) == before
    for work in outgoing:
        work.wait()
        assert work.is_completed()
        assert work.exception() is None
    assert target.tolist() == [[before * 10.0 + 1, before * 10.0 + 2]] * 3


def receive_from_anyone() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    if me == 0:
        found = {point_to_point.recv(value := torch.zeros(1)): value.item() for _ in range(size - 1)}
        assert found == {rank: float(rank) for rank in range(1, size)}
    else:
        point_to_point.send(torch.tensor([float(me)]), 0)


def pass_values_around() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    value = {"rank": me, "list": [None, True, 1.5, b"x" * me], "tensor": torch.arange(me)}
    everyone = objects.all_gather_object(value)
    assert [one["rank"] for one in everyone] == list(range(size))
    assert [len(one["list"][3]) for one in everyone] == list(range(size))
    assert objects.broadcast_object(value, size - 1)["tensor"].tolist() == list(range(size - 1))
    gathered = objects.gather_object(me * "a", 0)
    assert gathered == ([rank * "a" for rank in range(size)] if me == 0 else None)
    given = [(rank, "x" * rank) for rank in range(size)] if me == 0 else None
    assert objects.scatter_object(given, 0) == (me, "x" * me)
    if size > 1 and me == 0:
        objects.send_object({"to": 1}, 1, tag=7)
    if me == 1:
        assert objects.recv_object(0, tag=7) == {"to": 1}


def run_asynchronously() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    works = [c.all_reduce(torch.full((1000,), float(me + number)), async_op=True) for number in range(5)]
    for number, work in enumerate(works):
        expected = sum(range(size)) + number * size
        assert work.wait().unique().tolist() == [expected]
        assert work.wait().unique().tolist() == [expected], "waiting twice gives the same"
    c.barrier()


def everything() -> None:
    for part in (
        reduce_everything, move_everything, pass_values_around, run_asynchronously,
    ):  # fmt: skip
        part()
    if dist.get_world_size() > 1:
        send_in_a_ring()
        receive_from_anyone()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_operation_gives_what_it_must(world: World, backend: str, num_ranks: int) -> None:
    world.run(everything, num_ranks=num_ranks, backend=backend, timeout_s=60)


def history() -> list[tuple[str, int, int, str | None, bool]]:
    seen: list[td.events.CollectiveEvent] = []
    td.events.subscribe(seen.append, td.events.CollectiveEvent)  # type: ignore[arg-type]
    c.all_reduce(torch.zeros(4))
    c.barrier()
    kept = [(r.op, r.sequence, r.num_bytes, r.call_site, r.end_s is not None) for r in recorder]
    assert [(event.op, event.sequence) for event in seen] == [(op, sequence) for op, sequence, *_ in kept]
    assert all(event.duration_s > 0 for event in seen)
    return kept


def test_every_operation_is_recorded_with_its_call_site(world: World) -> None:
    for kept in world.run(history):
        assert [(op, sequence, size, done) for op, sequence, size, _, done in kept] == [
            ("all_reduce", 1, 16, True),
            ("barrier", 2, 0, True),
        ]
        assert kept[0][3] is not None
        assert "test_tensors.py:" in kept[0][3]


def wait_for_the_last() -> None:
    if dist.get_rank() < dist.get_world_size() - 1:
        c.barrier(timeout_s=1.0)
    else:
        time.sleep(6)  # the last rank is busy elsewhere


def test_a_deadline_names_the_ranks_that_did_not_come(world: World) -> None:
    outcomes = world.outcomes(wait_for_the_last, num_ranks=3)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, OperationTimeout), outcome
        assert outcome.error.context["missing_ranks"] == [2]
        assert outcome.error.operation == "barrier"
        assert outcome.error.context["sequence"] == 1


def begin_and_wait_late() -> str:
    """Rank 0 starts two operations with a second for each, and waits for them when it is over; rank 1 joins the first.

    Rank 1 joins the second too, but only after that: a second counted from the wait would be enough.
    """
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    if dist.get_rank() == 1:
        c.all_reduce(torch.ones(2))
        store.wait(["waiting"])
        time.sleep(0.3)
        try:
            c.all_reduce(torch.ones(2))
        except TorshError:
            return "rank 0 gave up"
        return "rank 0 had given its part"
    came = c.all_reduce(torch.ones(2), async_op=True, timeout_s=1.0)
    missing = c.all_reduce(torch.ones(2), async_op=True, timeout_s=1.0)
    time.sleep(1.1)
    assert came.wait().tolist() == [2.0, 2.0]
    store.set("waiting", "now")
    with pytest.raises(OperationTimeout) as caught:
        missing.wait()
    return str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_time_of_an_operation_counts_from_its_start(world: World, backend: str) -> None:
    message = world.run(begin_and_wait_late, backend=backend)[0]
    assert "all_reduce did not end within 1 s" in message
    assert "sequence=2" in message


def refused(case: str) -> str:
    cases = {
        "mean of integers": lambda: c.all_reduce(torch.zeros(2, dtype=torch.int32), "mean"),
        "bits of floats": lambda: c.reduce(torch.zeros(2), 0, "bxor"),
        "unknown": lambda: c.all_reduce(torch.zeros(2), "median"),
        "root": lambda: c.broadcast(torch.zeros(2), 7),
        "rows": lambda: c.reduce_scatter(torch.zeros(3)),
        "splits": lambda: c.all_to_all(torch.zeros(3), [1, 1], [1, 1]),
        "one split": lambda: c.all_to_all(torch.zeros(4), [2, 2]),
        "parts": lambda: c.scatter(torch.zeros(1), 0, [torch.zeros(1)]),
        "object": lambda: objects.all_gather_object(object()),
    }
    try:
        cases[case]()
    except (InvalidArgument, SerializationError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("mean of integers", InvalidArgument, "mean is not defined for torch.int32"),
        ("bits of floats", InvalidArgument, "bxor is not defined for torch.float32"),
        ("unknown", InvalidArgument, "use one of"),
        ("root", RankOutOfBounds, "src 7 is not a rank of the group"),
        ("rows", TensorShapeMismatch, "splits dim 0 evenly over 2 ranks"),
        ("splits", TensorShapeMismatch, "add up to 2 rows, but the tensor has 3"),
        ("one split", InvalidArgument, "both input_splits and output_splits"),
        ("parts", InvalidArgument, "one part for each rank"),
        ("object", SerializationError, "it is a object"),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(world: World, case: str, kind: type, message: str) -> None:
    for answer in world.run(refused, case):
        assert answer.startswith(kind.__name__)
        assert message in answer


def test_without_a_group_it_says_what_to_call() -> None:
    with pytest.raises(BackendNotInitialized, match=r"torsh_distributed\.init"):
        c.all_reduce(torch.zeros(1))
