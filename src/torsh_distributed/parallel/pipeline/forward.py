"""Forward through the stages without a schedule or gradients, for evaluation with batches of any size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.comm.collectives.objects import broadcast_object
from torsh_distributed.comm.collectives.point_to_point import recv, send
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups.manager import group_over
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.local_tensors import local_of
from torsh_distributed.parallel.pipeline.stages import StagePlan


class TiedGradients:
    """Sums gradients of shared parameters over the ranks that hold a copy, once a step.

    Copies stay equal: they start equal and get the same gradients and updates. If one rank holds all uses (a V-shaped
    schedule), the parameter is one tensor and nothing is sent.
    """

    def __init__(
        self,
        plan: StagePlan,
        stage_of: Mapping[int, int],
        built: Mapping[int, nn.Module],
        group: dist.ProcessGroup,
    ) -> None:
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self.copies: dict[str, int] = {}
        """Name of a shared parameter on this rank to the number of ranks that hold a copy."""
        self.names: dict[str, str] = {}
        """Every name of a shared parameter to the name of its first use."""
        self.names_here: dict[str, str] = {}
        """Every name of a shared parameter that this rank has a copy of, to its name here."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for uses in plan.tied:
            ranks = tuple(sorted({stage_of[stage] for stage, _ in uses}))
            self.names.update({name: uses[0][1] for _, name in uses})
            here = next((name for stage, name in uses if stage in built), None)
            if here is not None:
                self.names_here.update({name: here for _, name in uses})
            if len(ranks) == 1 or group.rank() not in ranks:
                continue
            if ranks not in made:
                made[ranks] = _subgroup(group, ranks)
            stage, name = next((stage, name) for stage, name in uses if stage in built)
            param = built[stage].get_parameter(name)
            self._shared.append((param, made[ranks]))
            self.copies.update({name: len(ranks) for stage, name in uses if stage in built})
            # Copies start with the first holder's values.
            held = _held(param.data)
            if held.numel():
                dist.broadcast(held, group=made[ranks], group_src=0)

    @torch.no_grad()
    def sum(self) -> None:
        """Sum the gradients; every rank that holds a copy calls this."""
        for param, group in self._shared:
            grad: Tensor = torch.zeros_like(param) if param.grad is None else param.grad
            held = _held(grad)
            if held.numel():
                all_reduce(held, group=group)
            param.grad = grad


def _held(tensor: Tensor) -> Tensor:
    """This rank's part of it: copies are sharded equally, so the holders of one shard communicate."""
    return local_of(tensor)


def _subgroup(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group over some ranks of `group`; those ranks call this."""
    if len(ranks) == group.size():
        return group
    return group_over([dist.get_global_rank(group, rank) for rank in ranks])


_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DTYPES = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_MAX_DIMS = 8


def run_stages(
    stages: Mapping[int, nn.Module],
    inputs: tuple[Any, ...],
    *,
    stage_of: Mapping[int, int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Any:
    """The output of the last stage, on its rank; None elsewhere. Every rank of the group calls this.

    Each tensor is preceded by its shape, so batches may differ in shape.
    """
    here = group.rank()
    values: tuple[Any, ...] = inputs
    for index in range(len(stage_of)):
        owner = stage_of[index]
        if owner == here:
            out = stages[index](*values)
            if index == len(stage_of) - 1:
                return out
            values = out if isinstance(out, tuple) else (out,)
            if stage_of[index + 1] != here:
                _send(values, dist.get_global_rank(group, stage_of[index + 1]), group)
        elif index + 1 < len(stage_of) and stage_of[index + 1] == here:
            values = _receive(dist.get_global_rank(group, owner), group, device)
    return None


def share_output(value: Any, owner: int, *, group: dist.ProcessGroup, device: torch.device) -> Any:
    """The owner's tensor on every rank; `owner` is a rank of the group, every rank of which calls this.

    Of a mapping, such as an output of transformers, the tensors in it, by name; of a tuple the tensors in it.
    """
    source = dist.get_global_rank(group, owner)
    named = None
    if isinstance(value, Mapping | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        named = {name: one for name, one in items if isinstance(one, Tensor)}
    names = broadcast_object(None if named is None else list(named), source, group=group)
    if names is None:
        return _share_tensor(value, source, group=group, device=device)
    held = named or {}
    shared = {name: _share_tensor(held.get(name), source, group=group, device=device) for name in names}
    return tuple(shared.values()) if all(isinstance(name, int) for name in names) else shared


def _share_tensor(value: Tensor | None, source: int, *, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    header = torch.zeros(2 + _MAX_DIMS, dtype=torch.int64, device=device) if value is None else _header(value)
    kind, dims, *shape = broadcast(header, source, group=group).tolist()
    held = torch.empty(shape[:dims], dtype=_DTYPES[kind], device=device) if value is None else value.contiguous()
    return broadcast(held, source, group=group)


def _header(value: Tensor) -> Tensor:
    """Dtype and shape as numbers."""
    if value.dim() > _MAX_DIMS or value.dtype not in _DTYPES:
        raise InvalidArgument(
            "stages cannot send a tensor of this kind",
            hint=f"use at most {_MAX_DIMS} dims and one of {', '.join(map(str, _DTYPES))}",
            shape=tuple(value.shape),
            dtype=value.dtype,
        )
    numbers = [_DTYPES.index(value.dtype), value.dim(), *value.shape]
    return torch.tensor(numbers + [0] * (2 + _MAX_DIMS - len(numbers)), device=value.device)


def _send(values: tuple[Tensor, ...], peer: int, group: dist.ProcessGroup) -> None:
    device = values[0].device
    send(torch.tensor([len(values)], device=device), peer, group=group)
    for value in values:
        send(_header(value), peer, group=group)
        send(value, peer, group=group)


def _receive(peer: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, ...]:
    count = torch.zeros(1, dtype=torch.int64, device=device)
    recv(count, peer, group=group)
    values = []
    for _ in range(int(count)):
        header = torch.zeros(2 + _MAX_DIMS, dtype=torch.int64, device=device)
        recv(header, peer, group=group)
        kind, dims, *shape = header.tolist()
        value = torch.empty(shape[:dims], dtype=_DTYPES[kind], device=device)
        recv(value, peer, group=group)
        values.append(value)
    return tuple(values)
