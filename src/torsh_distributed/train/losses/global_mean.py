"""A mean over what all ranks count, for loops and losses that the Engine does not weigh."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.reductions import all_reduce


def global_mean(total: Tensor, count: Tensor | float, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's part of the mean of `total` over `count` on all ranks of `group`; every rank of it calls this.

    The mean of the results over the ranks is the mean of all: call backward on it under DDP or FSDP, which average
    gradients, and average it for a report. `total` keeps its graph. A rank that counts nothing adds nothing::

        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = td.global_mean(total, (labels != -100).sum())

    In a step of the Engine it is for losses with several means; set `training.loss_is = "global_mean"` with it.
    """
    everyone = torch.as_tensor(count, dtype=torch.float64, device=total.device).detach().clone()
    num_ranks = 1
    if dist.is_initialized():
        num_ranks = dist.get_world_size(group)
        everyone = all_reduce(everyone, group=group)
    return total * (num_ranks / everyone).to(total.dtype)
