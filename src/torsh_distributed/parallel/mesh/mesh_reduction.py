"""The mean of a scalar over ranks, communicated while backward computes and read without waiting for backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.collectives.work import Work
from torsh_distributed.parallel.local_tensors import is_dtensor, local_of
from torsh_distributed.parallel.mesh.layout import GRADIENT_AXES
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.strategy import PendingNumber, Strategy
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


class MeshStrategy(Strategy):
    """A strategy over the axes of a mesh, whose ranks communicate in forward."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        axes = [axis for axis in mesh.layout.used_axes if axis != "tp"]
        self._random_part = mesh.layout.group_ranks(mesh.rank, *axes).index(mesh.rank) if axes else None

    @property
    @override
    def data_rank(self) -> int:
        return self._mesh.data_rank

    @property
    @override
    def data_degree(self) -> int:
        return self._mesh.data_degree

    @property
    @override
    def samples_group(self) -> dist.ProcessGroup:
        return self._mesh.group(*GRADIENT_AXES)

    @property
    @override
    def random_part(self) -> int | None:
        return self._random_part

    @property
    @override
    def forward_is_collective(self) -> bool:
        return True


class HostValue(PendingNumber):
    """A scalar being copied to the host: `wait` waits for what computed it, not for kernels queued later.

    Reading a GPU tensor with `float()` waits for everything queued until then, and the GPU is idle while the host
    queues what comes next.
    """

    def __init__(self, value: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not value.is_cuda:
            self._host = value
            return
        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._host.copy_(value, non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        self._arrived.record(torch.cuda.current_stream(value.device))

    @override
    def wait(self) -> float:
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._host)


def mean_over(value: Tensor, group: dist.ProcessGroup) -> PendingNumber:
    """Start averaging a scalar over the group; every rank of it calls this. `value` is not changed.

    Our CPU backends communicate when the mean is waited for: a small synchronous sum costs less there than waking a
    background thread.
    """
    sent = value.detach().float() / group.size()
    if group.size() == 1:
        return HostValue(sent)
    if not sent.is_cuda and dist.get_backend(group) in _QUICK_BACKENDS:
        return _LateMean(sent, group)
    work = all_reduce(sent, group=group, async_op=True)
    return _CudaMean(work, sent) if sent.is_cuda else _StartedMean(work)


_QUICK_BACKENDS = ("torsh", "shm")


class _LateMean(PendingNumber):
    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        self._sent = sent
        self._group = group

    @override
    def wait(self) -> float:
        return float(all_reduce(self._sent, group=self._group))


class _StartedMean(PendingNumber):
    def __init__(self, work: Work[Tensor]) -> None:
        self._work = work

    @override
    def wait(self) -> float:
        return float(self._work.wait())


class _CudaMean(PendingNumber):
    """Copied to the host on a second stream: reading it does not wait for kernels queued later."""

    def __init__(self, work: Work[Tensor], sent: Tensor) -> None:
        aside = torch.cuda.Stream(sent.device)  # type: ignore[no-untyped-call]  # untyped in torch
        aside.wait_stream(torch.cuda.current_stream(sent.device))
        with torch.cuda.stream(aside):
            self._mean = HostValue(work.wait())
            sent.record_stream(aside)

    @override
    def wait(self) -> float:
        return self._mean.wait()
