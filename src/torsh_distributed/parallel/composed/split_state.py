"""How a model split over tensor, pipeline and expert axes is saved as whole tensors by the model's own names.

The same form as for replicas and shards: saved under one layout, it loads under any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.parallel.expert.choose import ExpertParts
from torsh_distributed.parallel.expert.stacked_experts import (
    ExpertOwner,
    check_stacked,
    cut_stack,
    expert_runs,
    gather_stack,
)
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.state.held_tensors import DimRun, sent_by, values_of_owners
from torsh_distributed.parallel.state.whole_state import StateParts, part_of, plain_name, whole
from torsh_distributed.parallel.tensor import param_cuts
from torsh_distributed.parallel.tensor.split_params import TensorCut, bounds
from torsh_distributed.parallel.weights.model_weights import Rows


class SplitWeights(ExpertParts):
    """The pieces along `tp` and the experts along `ep`; construct it once the model is split."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        super().__init__(model)
        group = mesh.group("tp")
        self._rank, self._size = group.rank(), group.size()
        found = {} if self._size == 1 else param_cuts(model)
        self._cuts = {plain_name(name): cut for name, cut in found.items()}

    @override
    def runs(self, name: str, shape: Sequence[int]) -> Rows | None:
        cut = self._cuts.get(name)
        if cut is None:
            return super().runs(name, shape)
        if cut.dim != 0:
            return None
        found, begin = [], 0
        for length in cut.sections or (shape[0],):
            start, stop = bounds(length, rank=self._rank, size=self._size)
            found.append((begin + start, begin + stop))
            begin += length
        return found

    @override
    def piece(self, name: str, whole: Tensor) -> Tensor:
        cut = self._cuts.get(name)
        if cut is None:
            return super().piece(name, whole)
        return cut.part(whole, rank=self._rank, size=self._size)


@dataclass(frozen=True)
class ModelSplit(StateParts):
    """How the tensors of a model are split over ranks."""

    model: nn.Module
    """The whole model; layers of other stages are on the meta device."""
    cuts: Mapping[str, TensorCut]
    """Name to cut, for parameters of which this rank holds a piece."""
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    owner: Callable[[str], int]
    """Name to the pipeline rank that has the tensor."""
    names: Mapping[str, str]
    """Another name of a shared parameter to its first one."""
    experts: Mapping[str, ExpertOwner]
    """Name to layer, for stacks of which this rank holds its experts."""
    lengths: Mapping[str, int]
    """Name to the whole length of the dim that is cut."""

    @override
    def first_name(self, name: str) -> str:
        return self.names.get(name, name)

    @override
    def check(self, name: str, param: Tensor, optimizer: Optimizer) -> None:
        if name in self.experts:
            check_stacked(param, optimizer)

    @override
    def joined(self, name: str, value: Tensor) -> Tensor:
        """Joins the pieces along tp or ep; every rank of the axis calls this."""
        held = whole(value.detach())
        layer, cut = self.experts.get(name), self.cuts.get(name)
        if not held.dim():  # a count of steps, say
            return held
        if layer is not None:
            return gather_stack(held, layer)
        return held if cut is None or self.tp.size() == 1 else _gather(held, cut, self.tp)

    @override
    def from_owner(self, name: str, value: Tensor) -> Tensor:
        owner = self.owner(name)
        return sent_by(owner, self.joined(name, value) if owner == self.pp.rank() else None, self.pp)

    @override
    def part(self, name: str, value: Tensor, like: Tensor) -> Tensor:
        layer, cut = self.experts.get(name), self.cuts.get(name)
        if not value.dim():
            return value
        if layer is not None:
            value = cut_stack(value, layer)
        if cut is not None and self.tp.size() > 1:
            value = cut.part(value, rank=self.tp.rank(), size=self.tp.size())
        return part_of(value, like)

    @override
    def runs(self, name: str, shape: Sequence[int]) -> tuple[list[int], list[list[DimRun]]]:
        whole_shape, runs = super().runs(name, shape)
        layer, cut = self.experts.get(name), self.cuts.get(name)
        if shape and layer is not None:
            whole_shape[0], runs[0] = layer.num_experts, expert_runs(layer)
        if shape and cut is not None and self.tp.size() > 1:
            length = self.lengths[name]
            whole_shape[cut.dim] = length
            runs[cut.dim] = [DimRun(*run) for run in cut.runs(length, rank=self.tp.rank(), size=self.tp.size())]
        return whole_shape, runs

    @override
    def all_plain(self, mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for theirs in all_gather_object(mine, group=self.pp):
            found = {**theirs, **found}
        return found

    @override
    def all_groups(self, mine: list[list[str]]) -> list[list[str]]:
        """Those of all stages, in the order of the model."""
        order = [plain_name(name) for name, _ in self.model.named_parameters()]
        everyone = all_gather_object(mine, group=self.pp)
        return [
            sorted({name for theirs in everyone for name in theirs[number]}, key=order.index)
            for number in range(len(mine))
        ]

    @override
    def all_values(self, mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Each parameter's values on all ranks, sent by the first pipeline rank that has them."""
        return values_of_owners(mine, self.pp)

    @override
    def fits(self, mine: list[list[str]], saved: list[list[str]]) -> bool:
        """A rank's groups hold a part of the saved ones: the parameters of its stages."""
        return len(mine) == len(saved) and all(set(one) <= set(other) for one, other in zip(mine, saved, strict=True))


def _gather(held: Tensor, cut: TensorCut, group: dist.ProcessGroup) -> Tensor:
    """Pieces of all ranks along an axis, joined; their lengths differ, so shapes are exchanged first."""
    shapes = all_gather_object(list(held.shape), group=group)
    longest = max(shape[cut.dim] for shape in shapes)
    padded = held.new_zeros([*held.shape[: cut.dim], longest, *held.shape[cut.dim + 1 :]])
    padded.narrow(cut.dim, 0, held.shape[cut.dim]).copy_(held)
    received = [torch.empty_like(padded) for _ in shapes]
    dist.all_gather(received, padded, group=group)
    parts = [one.narrow(cut.dim, 0, shape[cut.dim]) for one, shape in zip(received, shapes, strict=True)]
    return cut.join(parts)
