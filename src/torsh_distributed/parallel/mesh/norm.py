"""The norm of the whole gradient where axes of the mesh split some parameters and replicate others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torsh_distributed.comm.collectives.reductions import all_reduce


@torch.no_grad()
def clip_over_mesh(
    params: Iterable[tuple[str, nn.Parameter]],
    max_norm: float,
    *,
    copies: Callable[[str, bool], int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Scale all gradients so that their norm over the whole model is at most `max_norm`; returns it as it was.

    Each rank adds up the squares of what it holds, divided by the number of ranks that hold the same: the sum over the
    world then counts every element once. `copies(name, is_sharded)` is that number. Every rank of `group` calls this.
    """
    grads = [(name, param.grad) for name, param in params if param.grad is not None]
    square = torch.zeros((), dtype=torch.float32, device=device)
    local: list[Tensor] = []
    for name, grad in grads:
        held = grad.to_local() if isinstance(grad, DTensor) else grad
        square += held.float().square().sum() / copies(name, isinstance(grad, DTensor))
        local.append(held)
    norm = all_reduce(square, group=group).sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for held in local:
        held.mul_(scale.to(held.dtype))
    return norm
