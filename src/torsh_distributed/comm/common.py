"""Tensors in memory that all ranks of a node have: written by one, read by the others where they lie."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.shm.wire import ShmWire
from torsh_distributed.comm.backends.wire import CommonUse


def shares_memory(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of the group talk through memory alone; the same on every rank."""
    return isinstance(group, TorshProcessGroup) and isinstance(group.wire, ShmWire)


def common_buffer(numel: int, dtype: torch.dtype, group: dist.ProcessGroup, use: CommonUse) -> Tensor | None:
    """A tensor for the next collective of that kind, which then copies less; None where there is none now.

    `together`: all ranks have the same memory, as the output of all_gather; this rank writes its part of it, which is
    also the source. `apart`: each has its own, as the source of reduce_scatter or the output of rows from all. Every
    rank of the group asks in the same order, for `together` also for the same size. Whether it gets one may differ: the
    collective is correct in any case. What nothing refers to any more is used again.
    """
    return group.common_buffer(numel, dtype, use) if isinstance(group, TorshProcessGroup) else None
