"""Parameters that every rank keeps whole beside its shards: broadcast at the start, their gradients averaged."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.comm.collectives.moves import all_gather, broadcast
from torsh_distributed.comm.collectives.reductions import all_reduce


@dataclass(frozen=True)
class GradientDifference:
    """A parameter whose gradient is not the same on all ranks."""

    name: str
    ranks: tuple[int, ...]
    """Ranks of the world that differ from the most common value, or from the first rank's if there is none."""

    @override
    def __str__(self) -> str:
        return f"{self.name} on rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"


def gradient_differences(named: Mapping[str, Tensor | None], group: dist.ProcessGroup) -> list[GradientDifference]:
    """Compare gradients bit by bit over the ranks, by hash; every rank calls this with the same names in order.

    A missing gradient counts as a value too. All ranks get the same answer. Costs one pass over the gradients and
    sends eight bytes per parameter.
    """
    if not named:
        return []
    device = next((value.device for value in named.values() if value is not None), torch.device("cpu"))
    hashes = torch.tensor([_hash(value) for value in named.values()], dtype=torch.int64, device=device)
    by_rank = [row.tolist() for row in all_gather(hashes, group=group)]
    ranks = dist.get_process_group_ranks(group)
    found = []
    for name, values in zip(named, zip(*by_rank, strict=True), strict=True):
        odd = _odd_ones(values, ranks)
        if odd:
            found.append(GradientDifference(name, odd))
    return found


def _odd_ones(values: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    common, count = Counter(values).most_common(1)[0]
    usual = common if count > 1 else values[0]
    return tuple(rank for rank, value in zip(ranks, values, strict=True) if value != usual)


def _hash(gradient: Tensor | None) -> int:
    if gradient is None:
        return 0
    data = gradient.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().data
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


T = TypeVar("T", bound=Tensor)


def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite these tensors with those of the group's first rank; every rank of the group calls this.

    Tensors of one dtype and device are sent together, in messages of about 25 MB.
    """
    if group.size() == 1:
        return
    first = dist.get_global_rank(group, 0)
    for batch in batches(list(tensors)):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
        _spread(broadcast(flat, first, group=group), batch)


class ReplicatedGradients:
    """Averages the gradients of whole parameters: once a step, in one message, before they are read.

    A parameter without a gradient on some rank counts as zero there; one without a gradient on any rank keeps None, so
    the optimizer skips it, as in one process.
    """

    def __init__(self, params: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._all = list(params)
        self._group = group
        self._averaged: list[Tensor] = []

    @property
    def _params(self) -> list[nn.Parameter]:
        """Those that are trained now: layers may be frozen and unfrozen between steps."""
        return [param for param in self._all if param.requires_grad]

    def average(self) -> None:
        """Average now, unless already done since the last step; every rank of the group calls this."""
        params = self._params
        if not params or self._group.size() == 1 or self._is_done():
            return
        has_gradient = torch.tensor([float(param.grad is not None) for param in params])
        flat = torch.cat([has_gradient.to(params[0].device), *(_gradient(param) for param in params)])
        mean = all_reduce(flat, op="mean", group=self._group)
        used = mean[: len(params)] > 0
        values = torch.split(mean[len(params) :], [param.numel() for param in params])
        for param, is_used, value in zip(params, used.tolist(), values, strict=True):
            param.grad = value.view_as(param).to(param.dtype) if is_used else None
        self._averaged = [param.grad for param in params if param.grad is not None]

    def forget(self) -> None:
        """The optimizer has stepped: the next gradients are new."""
        self._averaged = []

    def _is_done(self) -> bool:
        """Whether the parameters hold what the last average gave: after a failed step they hold others, or none."""
        held = [param.grad for param in self._params if param.grad is not None]
        return bool(held) and list(map(id, held)) == list(map(id, self._averaged))


def _gradient(param: nn.Parameter) -> Tensor:
    grad = torch.zeros_like(param) if param.grad is None else param.grad
    return grad.detach().float().reshape(-1)


def batches(tensors: Sequence[T], *, max_bytes: int = 25 * 2**20) -> Iterator[list[T]]:
    """Tensors that can be sent as one message: neighbours of one dtype and device, up to `max_bytes` together."""
    batch: list[T] = []
    for tensor in tensors:
        same = bool(batch) and (batch[0].dtype, batch[0].device) == (tensor.dtype, tensor.device)
        if batch and (not same or sum(one.nbytes for one in batch) + tensor.nbytes > max_bytes):
            yield batch
            batch = []
        batch.append(tensor)
    if batch:
        yield batch


@torch.no_grad()
def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(value.view_as(tensor))
