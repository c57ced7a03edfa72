"""The norm of 16-bit gradients and the factor that clips them, rounded where DeepSpeed rounds them.

In 16 bits a factor that differs in its last bit rounds some parameter the other way, which is visible in the loss.
Without ZeRO DeepSpeed adds up in fp32, parameter by parameter; under ZeRO in fp64 on each rank, and over the ranks in
fp32 (stages 1 and 2) or fp64 (stage 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.parallel.mesh.grad_norm import held_by_placement
from torsh_distributed.parallel.sharded.sharded_strategy import Sharded
from torsh_distributed.parallel.torch_internals import _foreach_norm
from torsh_distributed.train.engine import Engine


@torch.no_grad()
def scaled_norm(core: Engine, stage: int) -> Tensor:
    """The norm of the whole gradient, still times the loss scale; every rank calls this.

    For modules in 16 bits whose strategy is replicas or shards.
    """
    if isinstance(core.strategy, Sharded):
        core.strategy.wrapped.average_replicated()
    grads = [param.grad for param in core.unwrapped.parameters() if param.grad is not None]
    if stage == 0:
        total = torch.zeros(())
        for grad in grads:
            total = total + grad.float().norm() ** 2
        return total.double().sqrt()
    squares = torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else None)
    for held in held_by_placement(grads):
        local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in held.grads]
        square = torch.stack(list(_foreach_norm(local, 2, dtype=torch.float64))).square().sum()
        for group in held.groups:
            all_reduce(square, group=group)
        squares = squares + square
    return squares.sqrt() if stage == 3 else squares.float().sqrt()


def factor_of(norm: Tensor, *, scale: float, clipping: float) -> float:
    """What gradients of this scaled norm are multiplied by: undoes the loss scale, and clips unless `clipping` is 0."""
    if clipping <= 0:
        return 1.0 / scale
    excess = torch.clamp((norm / scale + 1e-6) / clipping, min=1.0)
    return float(1.0 / (excess * scale))
