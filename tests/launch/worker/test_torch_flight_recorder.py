"""torch's own flight recorder, read for gloo."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed.launch.worker.torch_flight_recorder import TorchRecord, torch_records


def test_an_entry_has_our_names() -> None:
    one = TorchRecord(
        {
            "process_group": ["3", "dp"],
            "profiling_name": "nccl:_all_gather_base",
            "collective_seq_id": 7,
            "output_sizes": [[4, 8]],
            "output_dtypes": ["BFloat16"],
            "state": "scheduled",
        }
    )
    assert (one.op, one.group, one.sequence, one.num_bytes, one.is_ended) == ("all_gather_single", "3", 7, 64, False)
    message = TorchRecord({"profiling_name": "nccl:recv 0<-1", "is_p2p": True, "p2p_seq_id": 2, "state": "completed"})
    assert (message.op, message.peer, message.sequence, message.is_ended) == ("recv", 1, 2, True)


def record_on_gloo() -> list[tuple[str, int, int, bool]]:
    dist.all_reduce(torch.ones(10))
    dist.barrier()
    deadline = time.monotonic() + 30  # a thread of torch notes that an operation has ended
    while time.monotonic() < deadline and not any(one.op == "all_reduce" and one.is_ended for one in torch_records()):
        time.sleep(0.01)
    return [(one.op, one.sequence, one.num_bytes, one.is_ended) for one in torch_records()]


@pytest.mark.ranks
def test_gloo_is_recorded_by_torch(world: World) -> None:
    for seen in world.run(record_on_gloo, backend="gloo", env={"TORCH_FR_BUFFER_SIZE": "64"}):
        assert ("all_reduce", 1, 40, True) in seen
        assert any(op == "barrier" and number == 2 for op, number, _, _ in seen)
