"""Waits for torch's own groups: seen while somebody asks, with the group, the bytes and the time of who is late."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.comm.recording.native_waits import timed_native_groups
from torsh_distributed.events import WaitEvent

pytestmark = pytest.mark.ranks
LATE_S = 0.3
METHODS = ("allreduce", "barrier", "send")


def replaced() -> list[bool]:
    """Whether methods of torch are other ones than its own."""
    owned = [dist.ProcessGroup.__dict__[name] for name in METHODS] + [dist.Work.__dict__["wait"]]
    return [type(method).__name__ == "function" for method in owned]


def operate() -> list[tuple[str, str, int, int, float]]:
    """Runs on two ranks of gloo, the second of which comes late to what is waited for."""
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    found: list[WaitEvent] = []
    end = events.subscribe(found.append, WaitEvent)  # type: ignore[arg-type]  # only of that type
    dist.all_reduce(torch.ones(8))
    assert not found, "nobody asked"
    with timed_native_groups():
        with timed_native_groups():
            assert all(replaced())
        assert all(replaced()), "the first still asks"
        work = dist.all_reduce(torch.ones(8), group=pair, async_op=True)
        assert work is not None
        work.wait()
        outputs = [torch.empty(4) for _ in range(2)]
        if rank == 1:
            time.sleep(LATE_S)
        dist.all_gather(outputs, torch.ones(4))
        dist.reduce_scatter([torch.ones(3), torch.ones(3)][rank], [torch.ones(3), torch.ones(3)])
        if rank == 0:
            dist.send(torch.ones(5), 1)
        else:
            dist.recv(torch.empty(5), 0)
    assert not any(replaced())
    num_seen = len(found)
    dist.all_reduce(torch.ones(8))
    assert len(found) == num_seen
    end()
    names = {dist.group.WORLD.group_name: "world", pair.group_name: "pair"}  # type: ignore[union-attr]
    return [
        (one.op, names.get(one.group, "other"), one.num_started, one.num_bytes, one.duration_s)
        for one in found
        if one.op != "barrier"
    ]


def test_operations_and_waits_of_gloo_are_seen(world: World) -> None:
    first, second = world.run(operate, num_ranks=2, backend="gloo", timeout_s=60)
    for seen, message in ((first, "send"), (second, "recv")):
        starts = [(op, group, num_bytes) for op, group, num_started, num_bytes, _ in seen if num_started]
        assert starts == [
            ("all_reduce", "pair", 32),
            ("all_gather", "world", 32),
            ("reduce_scatter", "world", 24),
            (message, "world", 20),
        ]
        waits = [op for op, _, num_started, _, _ in seen if not num_started]
        assert waits == ["all_reduce", "all_gather", "reduce_scatter", message]
    [waited_s] = [seconds for op, _, num_started, _, seconds in first if op == "all_gather" and not num_started]
    assert waited_s > 0.8 * LATE_S
