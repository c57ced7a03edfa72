"""What all operations share: the record of a call, its deadline, the group it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torsh_distributed as td
from tests.bed.world import World
from torsh_distributed.comm.collectives.moves import barrier
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.recording.flight_recorder import recorder
from torsh_distributed.errors import BackendNotInitialized, OperationTimeout


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
