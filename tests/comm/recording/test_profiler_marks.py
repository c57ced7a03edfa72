"""Our operations in torch's profilers: titles, sizes, dtypes, threads and times."""

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
