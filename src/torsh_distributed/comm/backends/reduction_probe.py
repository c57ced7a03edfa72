"""Which reductions a group takes, found by trying each on every dtype."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torsh_distributed.comm.reduce_op import ReduceOp

Reductions = frozenset[tuple[ReduceOp, torch.dtype]]

_PROBED_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def probe_reductions(group: Any, device: str = "cpu") -> Reductions:
    """The pairs that all_reduce of a one-rank group takes.

    Any: torch's stubs do not derive its groups from ProcessGroup.
    """
    found = set()
    for op in ReduceOp:
        for dtype in _PROBED_DTYPES:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(op.to_torch())
            try:
                group.allreduce([torch.ones(2, device=device).to(dtype)], options).wait()
            except (RuntimeError, TypeError, ValueError):
                continue  # this pair is refused: that is the answer the probe is after
            found.add((op, dtype))
    return frozenset(found)


@functools.cache
def gloo_reductions() -> Reductions:
    """What gloo takes, tried in a group outside torch's registry, so probing leaves no trace."""
    return probe_reductions(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30)))
