"""What all operations share: the record of a call, its deadline, the group it needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torsh_distributed as td
from tests.bed.world import World
from torsh_distributed.comm.collectives.call import enable_checks
from torsh_distributed.comm.collectives.moves import all_gather, all_to_all_single, barrier, broadcast
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.recording.flight_recorder import recorder
from torsh_distributed.errors import BackendNotInitialized, OperationTimeout, TensorShapeMismatch


def history() -> list[tuple[str, int, int, str | None, bool]]:
    seen: list[td.events.CollectiveEvent] = []
    td.events.subscribe(seen.append, td.events.CollectiveEvent)  # type: ignore[arg-type]
    all_reduce(torch.zeros(4))
    barrier()
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
        assert f"{Path(__file__).name}:" in kept[0][3]


def wait_for_the_last() -> None:
    """The last rank is busy elsewhere until the others have given up."""
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    me, last = dist.get_rank(), dist.get_world_size() - 1
    if me == last:
        store.wait([f"gave up/{rank}" for rank in range(last)])
        return
    try:
        barrier(timeout_s=1.0)
    finally:
        store.set(f"gave up/{me}", "")


def test_a_deadline_names_the_ranks_that_did_not_come(world: World) -> None:
    outcomes = world.outcomes(wait_for_the_last, num_ranks=3)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, OperationTimeout), outcome
        assert outcome.error.context["missing_ranks"] == [2]
        assert outcome.error.operation == "barrier"
        assert outcome.error.context["sequence"] == 1


def test_without_a_group_it_says_what_to_call() -> None:
    with pytest.raises(BackendNotInitialized, match=r"torsh_distributed\.init"):
        all_reduce(torch.zeros(1))


def differ(case: str) -> str:
    enable_checks(True)
    odd = dist.get_rank() == 1
    calls: dict[str, Callable[[], object]] = {
        "shape": lambda: all_reduce(torch.zeros(3 if odd else 4)),
        "dtype": lambda: all_reduce(torch.zeros(4, dtype=torch.float64 if odd else torch.float32)),
        "reduction": lambda: all_reduce(torch.zeros(4), "max" if odd else "sum"),
        "operation": lambda: all_gather(torch.zeros(4)) if odd else all_reduce(torch.zeros(4)),
        "order": lambda: barrier() if odd else broadcast(torch.zeros(4), 0),
        "root": lambda: broadcast(torch.zeros(4), 1 if odd else 0),
    }
    barrier()
    try:
        calls[case]()
    except TensorShapeMismatch as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("case", "sides"),
    [
        ("shape", ["(4,)", "(3,)"]),
        ("dtype", ["float32", "float64"]),
        ("reduction", ["sum", "max"]),
        ("operation", ["all_reduce", "all_gather"]),
        ("order", ["broadcast", "barrier"]),
        ("root", ["broadcast", "1)"]),
    ],
)
def test_a_mismatch_names_both_sides_on_every_rank(world: World, case: str, sides: list[str]) -> None:
    answers = world.run(differ, case, num_ranks=3)
    assert len(set(answers)) == 1, "every rank says the same"
    assert "operation number 2 differs between ranks: rank 0 calls" in answers[0]
    assert "rank 1 calls" in answers[0]
    assert answers[0].count("test_call.py:") == 2
    for side in sides:
        assert side in answers[0]


def agree() -> float:
    enable_checks(True)
    value = torch.ones(3)
    for _ in range(5):
        all_reduce(value, "mean")
    rows = torch.zeros(dist.get_rank() + 1, 2)
    splits = [dist.get_rank() + 1, 0]
    all_to_all_single(rows, splits, [1, 2] if dist.get_rank() == 0 else [0, 0])
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    barrier()
    assert not store.check(["agreement/1/0"]), "announcements are cleaned up"
    return value.sum().item()


def test_equal_calls_pass_and_leave_nothing_behind(world: World) -> None:
    assert world.run(agree) == [3.0, 3.0]


def stay_behind() -> None:
    enable_checks(True)
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    if dist.get_rank() == 1:
        store.wait(["gave up"])
        return
    try:
        all_reduce(torch.zeros(1), timeout_s=1.0)
    finally:
        store.set("gave up", "")


def test_a_rank_that_is_behind_is_named(world: World) -> None:
    [first, _] = world.outcomes(stay_behind)
    assert isinstance(first.error, OperationTimeout)
    assert first.error.context["missing_ranks"] == [1]
    assert "rank 1 did not announce operation number 1" in str(first.error)


def come_late() -> float:
    """Runs on every rank: rank 1 is late at the first compared operation, within the group's deadline."""
    enable_checks(True)
    if dist.get_rank() == 1:
        time.sleep(0.3)  # lateness itself is what is tested
    return float(all_reduce(torch.ones(1)))


@pytest.mark.parametrize("backend", ["shm", "torsh", "gloo"])
def test_a_late_rank_is_waited_for_as_long_as_the_group_allows(world: World, backend: str) -> None:
    assert world.run(come_late, num_ranks=2, backend=backend) == [2.0, 2.0]
