"""The norm of the whole gradient, however it is spread over ranks, and clipping to a maximum norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.parallel.local_tensors import is_dtensor, local_of
from torsh_distributed.parallel.torch_internals import _foreach_mul_, _foreach_norm


@dataclass(frozen=True)
class HeldGradients:
    """Gradients that this rank holds: whole, or a part, with the rest on the other ranks of `groups`."""

    grads: Sequence[Tensor]
    """Plain tensors, or DTensors, of which the local part counts."""
    groups: tuple[dist.ProcessGroup, ...] = ()
    num_copies: int = 1
    """How many ranks of `groups` hold each of these elements."""


@torch.no_grad()
def grad_norm(held: Iterable[HeldGradients], device: torch.device) -> Tensor:
    """The 2-norm over all ranks: an fp32 scalar on `device`, equal on every rank; not finite if any element is not.

    Every rank of the groups calls this with the same groups in the same order. On a GPU the host does not wait.
    """
    return sum_of_squares(held, device, torch.float32).sqrt()


@torch.no_grad()
def sum_of_squares(held: Iterable[HeldGradients], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The square of the norm, added up in `dtype` on each rank and over the ranks; otherwise as `grad_norm`."""
    squares: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    for one in held:
        square = _squares_here(one.grads, device, dtype) / one.num_copies
        known = squares.get(one.groups)
        squares[one.groups] = square if known is None else known + square
    for groups, square in squares.items():
        for group in groups:
            all_reduce(square, group=group)
    return torch.stack([*squares.values(), torch.zeros((), device=device, dtype=dtype)]).sum()


@torch.no_grad()
def clip_to_norm(grads: Iterable[Tensor], norm: Tensor, max_norm: float | None) -> None:
    """Scale gradients of this norm, in place, so it is at most `max_norm`; None leaves them alone."""
    if max_norm is not None:
        multiply(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


@torch.no_grad()
def multiply(grads: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply this rank's part of gradients by a number, in place."""
    local = [local_of(grad) for grad in grads]
    if local:
        _foreach_mul_([grad._values() if grad.is_sparse else grad for grad in local], factor)


def held_by_placement(grads: Iterable[Tensor]) -> list[HeldGradients]:
    """Sharded gradients with the groups that hold their other shards; plain ones are whole on every rank."""
    by_place: dict[object, list[Tensor]] = {}
    for grad in grads:
        by_place.setdefault((grad.device_mesh, grad.placements) if is_dtensor(grad) else None, []).append(grad)
    return [HeldGradients(found, _shard_groups(found[0])) for found in by_place.values()]


def _shard_groups(grad: Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not is_dtensor(grad):
        return ()
    placements = enumerate(grad.placements)
    return tuple(grad.device_mesh.get_group(axis) for axis, placement in placements if not placement.is_replicate())


def _squares_here(grads: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    local = [local_of(grad) for grad in grads]
    values = [grad.coalesce().values() if grad.is_sparse else grad for grad in local]
    if not values:
        return torch.zeros((), device=device, dtype=dtype)
    is_wide = any(value.dtype.itemsize > dtype.itemsize for value in values)
    norms = _foreach_norm(values, 2, dtype=None if is_wide else dtype)
    return torch.stack(list(norms)).square().sum().to(device, dtype)
