"""The ring of the last operations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import torsh_distributed as td
from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.comm.collectives.call import enable_checks
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


pytestmark = pytest.mark.ranks


def profile_operations(folder: str) -> dict[str, Any]:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    backend = dist.get_backend()
    for _ in range(2):
        td.all_reduce(torch.ones(8))  # the short path is open from here on
        dist.all_reduce(torch.ones(8))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        td.all_reduce(torch.ones(1000))
        dist.all_reduce(torch.ones(3, 5, dtype=torch.float64))
        dist.broadcast(torch.ones(4), src=0)
        work = dist.all_reduce(torch.ones(7, dtype=torch.int32), async_op=True)
        assert work is not None
        work.wait()
        message = torch.ones(6)
        if rank == 0:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            dist.recv(message, peer)
            dist.send(message, peer)
        dist.barrier()
    dist.all_reduce(torch.ones(8))
    found = [
        (event.name, [list(shape) for shape in event.input_shapes or []], event.time_range.elapsed_us(), event.thread)
        for event in seen.events() or []
        if event.name.startswith(f"{backend}:")
    ]
    path = Path(folder) / f"{backend}-{rank}.json"
    seen.export_chrome_trace(str(path))
    titles = (f"{backend}:", "started ")
    drawn = [one for one in json.loads(path.read_text())["traceEvents"] if str(one.get("name")).startswith(titles)]
    with torch.autograd.profiler.profile() as old:
        dist.all_reduce(torch.ones(8))
    return {
        "found": found,
        "drawn": [(one["name"], one.get("args", {})) for one in drawn],
        "old": [event.name for event in old.function_events or []],
    }


@pytest.mark.parametrize("backend", ["shm", "torsh"])
def test_every_operation_appears_with_its_title_sizes_and_dtypes(world: World, tmp_path: Path, backend: str) -> None:
    for seen in world.run(profile_operations, str(tmp_path), backend=backend):
        names = [name.partition(":")[2] for name, *_ in seen["found"]]
        assert sorted(names) == sorted(
            ["all_reduce", "all_reduce", "broadcast", "all_reduce", "send", "recv", "barrier"]
        ), seen
        assert all(took_us > 0 for _, _, took_us, _ in seen["found"])
        shapes = [shape for name, shape, *_ in seen["found"] if name == f"{backend}:all_reduce"]
        assert [[1000]] in shapes
        assert [[3, 5]] in shapes
        facts = [args for name, args in seen["drawn"] if name == f"{backend}:all_reduce"]
        assert any(args.get("Input type") == ["double"] for args in facts), facts
        (started,) = [args for name, args in seen["drawn"] if args.get("dtype") == "int32"]
        assert (started["Collective name"], started["Out msg nelems"], started["Group size"]) == ("all_reduce", 7, 2)
        assert f"{backend}:all_reduce" in seen["old"]


def profile_ddp() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(torch.ones(2, 16)).sum().backward()
    logged = model._get_ddp_logging_data()
    return {"names": [event.name for event in seen.events() or []], "backend": logged.get("backend_name")}


def test_the_buckets_of_torchs_ddp_appear_and_its_log_names_the_backend(world: World) -> None:
    for seen in world.run(profile_ddp, backend="shm"):
        assert "shm:all_reduce" in seen["names"]
        assert seen["backend"] == "shm"
