"""The gradients of a step whose average failed: kept by the ranks that are left, and averaged again among them.

A bucket that was averaged before the failure is done: it has the gradients of all ranks, the lost one's too. Any other
bucket still has this rank's own gradients. So what is missing of them is what the lost rank had computed, which the
others compute in addition, and the average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.parallel.data.ddp import DistributedDataParallel
from torsh_distributed.parallel.data.gradient_sync import BucketOutcomes


@dataclass(frozen=True)
class InterruptedGradients:
    """Copies of a rank's gradients, with the buckets of them that were averaged already."""

    gradients: Mapping[str, Tensor]
    outcomes: BucketOutcomes


def keep_gradients(ddp: DistributedDataParallel) -> InterruptedGradients | None:
    """What this rank has after a backward that raised; None if some of it is neither its own nor the average.

    Copied, because the memory may belong to a group that is about to go. Only a failure costs this copy.
    """
    outcomes = ddp.bucket_outcomes()
    if outcomes is None:
        return None
    held = {name: param.grad for name, param in ddp.trained.items()}
    names = {name for bucket in outcomes.names.values() for name in bucket}
    if names != set(held) or any(grad is None for grad in held.values()):
        return None
    return InterruptedGradients(
        {name: grad.detach().clone() for name, grad in held.items() if grad is not None}, outcomes
    )


@torch.no_grad()
def finish_average(
    ddp: DistributedDataParallel, kept: InterruptedGradients, *, sources: Mapping[int, int], scale: float
) -> None:
    """Average what was kept, times `scale`, plus what the parameters hold now; every rank of the new world calls this.

    `sources` names for each bucket that was averaged before, on some rank at least, a rank of the new world that has
    it: the others take it from there.
    """
    group = ddp.process_group
    missing: dict[str, Tensor] = {}
    for index in sorted(kept.outcomes.names):
        for name in kept.outcomes.names[index]:
            param, mine = ddp.trained[name], kept.gradients[name]
            if index in sources:
                param.grad = broadcast(mine, sources[index], group=group) if group.size() > 1 else mine
                continue
            mine.mul_(scale)
            param.grad = mine if param.grad is None else mine.add_(param.grad)
            missing[name] = param.grad
    if missing and group.size() > 1:
        ddp.average_now(missing)
