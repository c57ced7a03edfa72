"""The norm of the whole gradient where every rank holds a part of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from torsh_distributed.comm.collectives.reductions import all_reduce


@torch.no_grad()
def clip_grad_norm(params: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm` (None only measures); returns it as it was.

    Every rank calls this with the same parameters; sharded gradients are summed over the ranks that hold the rest, and
    every rank gets the same value. A gradient that is not finite gives a norm that is not, as in torch.
    """
    by_place: dict[object, list[DTensor]] = {}
    local: list[Tensor] = []
    for param in params:
        grad = param.grad
        if isinstance(grad, DTensor):
            by_place.setdefault((grad.device_mesh, grad.placements), []).append(grad)
        elif grad is not None:
            local.append(grad)
    squares = [_square(local)] if local else []
    for grads in by_place.values():
        square = _square([grad.to_local() for grad in grads])
        for axis, placement in enumerate(grads[0].placements):
            if not isinstance(placement, Replicate):
                all_reduce(square, group=grads[0].device_mesh.get_group(axis))
        squares.append(square)
    if not squares:
        return torch.zeros(())
    norm = torch.stack(squares).sum().sqrt()
    if max_norm is not None:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for tensors in (local, *([grad.to_local() for grad in grads] for grads in by_place.values())):
            if tensors:
                torch._foreach_mul_(tensors, scale.to(tensors[0].device))
    return norm


def _square(grads: list[Tensor]) -> Tensor:
    """The sum of squares of this rank's parts, in fp32."""
    norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
    return torch.stack(list(norms)).square().sum()
