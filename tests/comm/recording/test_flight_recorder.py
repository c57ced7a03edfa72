"""The ring of the last operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.comm.collectives.matching import enable_checks
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.recording.flight_recorder import FlightRecorder, recorder


def test_the_last_operations_are_kept_and_numbered_by_group() -> None:
    recorder = FlightRecorder(capacity=3)
    for group in ("a", "b", "a", "a"):
        recorder.begin("all_reduce", group, 8)
    assert [(record.group, record.sequence) for record in recorder] == [("b", 1), ("a", 2), ("a", 3)]
    last = recorder.last("b")
    assert last is not None
    assert last.sequence == 1
    assert recorder.last("c") is None


def test_a_record_knows_its_caller_its_duration_and_its_error() -> None:
    recorder = FlightRecorder()
    record = recorder.begin("send", "world", 4, peer=1)
    assert record.duration_s is None
    assert "under way" in repr(record)
    assert record.call_site is not None
    assert record.call_site.startswith(f"{Path(__file__)}:")
    recorder.end(record, ValueError("lost"))
    assert record.duration_s is not None
    assert record.duration_s >= 0
    assert record.error == "ValueError: lost"


def test_the_end_of_an_operation_is_an_event() -> None:
    recorder, seen = FlightRecorder(), list[events.Event]()
    stop = events.subscribe(seen.append, events.CollectiveEvent)
    try:
        recorder.end(recorder.begin("recv", "world", 16, peer=2))
    finally:
        stop()
    (event,) = seen
    assert isinstance(event, events.CollectiveEvent)
    assert (event.op, event.group, event.num_bytes, event.peer, event.error) == ("recv", "world", 16, 2, None)


def call_torch_directly() -> list[tuple[str, int, bool, str | None]]:
    """Runs on every rank: torch's own functions on one of our groups, one of them asynchronous, one that fails."""
    before = len(list(recorder))
    whole = torch.zeros(4 * dist.get_world_size())
    dist.all_reduce(torch.ones(256))  # looks up the fold; the next one takes the short path
    dist.all_reduce(torch.ones(256))
    dist.broadcast(torch.ones(3), src=0)
    dist.all_gather_into_tensor(whole, torch.ones(4))
    dist.all_reduce(torch.ones(8), async_op=True).wait()
    peer = 1 - dist.get_rank()
    messages = [dist.isend(torch.ones(2), peer), dist.irecv(torch.ones(2), peer)]
    for message in messages:
        message.wait()
    all_reduce(torch.ones(16))
    all_reduce(torch.ones(16), algorithm="ring")
    found = list(recorder)[before:]
    return [(one.op, one.num_bytes, one.is_brief or one.end_s is not None, one.call_site) for one in found]


@pytest.mark.parametrize("backend", ["shm", "torsh"])
def test_torchs_own_calls_on_our_backends_are_recorded_and_ours_once(world: World, backend: str) -> None:
    here = Path(__file__).name
    for found in world.run(call_torch_directly, num_ranks=2, backend=backend):
        assert [(op, num_bytes) for op, num_bytes, _, _ in found] == [
            ("all_reduce", 1024),
            ("all_reduce", 1024),
            ("broadcast", 12),
            ("all_gather_single", 32),
            ("all_reduce", 32),
            ("send", 8),
            ("recv", 8),
            ("all_reduce", 64),
            ("all_reduce:ring", 64),
        ]
        assert all(is_ended for _, _, is_ended, _ in found)
        # Two took the short path, on which call sites are not looked up.
        assert [here in call_site for *_, call_site in found if call_site is not None] == [True] * (len(found) - 2)


def take_different_paths() -> tuple[list[int], float]:
    """Runs on every rank: a strided tensor keeps rank 0 off the short path; then td's operations compare numbers."""
    enable_checks(True)
    first = len(list(recorder))
    for _ in range(3):
        tensor = torch.ones(4, 2)[:, 0] if dist.get_rank() == 0 else torch.ones(4)
        dist.all_reduce(tensor)
    total = all_reduce(torch.ones(1), timeout_s=20)
    return [record.sequence for record in list(recorder)[first:]], float(total)


def test_the_numbers_of_our_operations_do_not_depend_on_the_path_of_torchs_calls(world: World) -> None:
    numbers = world.run(take_different_paths, num_ranks=2, backend="shm")
    assert [total for _, total in numbers] == [2.0, 2.0]
    assert numbers[0][0] == numbers[1][0]
