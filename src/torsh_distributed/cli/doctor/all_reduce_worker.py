"""A worker of the doctor's all-reduce: sums known values on each backend, and raises if a value is wrong."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import torsh_distributed as td
from torsh_distributed.errors import InternalError

_NUMEL = 1024
_ROUNDS = 20


def main(answer: str) -> None:
    """Run on every rank; rank 0 writes seconds per call by backend to `answer`."""
    took: dict[str, float] = {}
    td.init(timeout_s=60.0)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    names = [dist.get_backend(), "gloo"]
    if torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks:
        names.append("nccl")
    for name in dict.fromkeys(names):
        group = dist.new_group(backend=name) if name != dist.get_backend() else dist.group.WORLD
        device = f"cuda:{rank}" if name == "nccl" else "cpu"
        values = torch.arange(_NUMEL, dtype=torch.float64, device=device) + rank
        dist.all_reduce(values, group=group)
        expected = num_ranks * torch.arange(_NUMEL, dtype=torch.float64) + sum(range(num_ranks))
        if not torch.equal(values.cpu(), expected):
            raise InternalError(f"{name} sums wrong values", rank=rank, backend=name)
        message = torch.zeros(_NUMEL, device=device)
        started_s = time.perf_counter()
        for _ in range(_ROUNDS):
            dist.all_reduce(message, group=group)
        took[name] = (time.perf_counter() - started_s) / _ROUNDS
    if rank == 0:
        Path(answer).write_text(json.dumps(took))
    td.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
