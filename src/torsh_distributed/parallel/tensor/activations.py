"""Activations on their way into and out of split layers: whole, split along the sequence, or sharded (DTensor)."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torsh_distributed.errors import TensorShapeMismatch
from torsh_distributed.parallel.compiling import outside_graphs
from torsh_distributed.parallel.tensor.regions import enter_split, sum_parts


class _Entered(NamedTuple):
    """The activation that entered a split layer last, and as what. Weak: nothing lives longer for it."""

    input: weakref.ref[Tensor]
    version: int
    has_gradient: bool
    mesh: DeviceMesh
    whole: weakref.ref[Tensor]


_last_entered: _Entered | None = None


@outside_graphs
def whole_input(input: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole activation for a split layer, from a plain tensor or a DTensor; its gradient is summed over ranks.

    Layers that take the same activation, as query, key and value do, take the same tensor: it is gathered once, and
    its gradient is summed once.
    """
    global _last_entered
    if input.is_inference():  # such tensors do not tell whether they were changed
        return _enter(input, mesh)
    has_gradient, last = torch.is_grad_enabled(), _last_entered
    if last is not None and last.input() is input and last.mesh is mesh and last.version == input._version:
        whole = last.whole()
        if whole is not None and last.has_gradient == has_gradient:
            return whole
    whole = _enter(input, mesh)
    _last_entered = _Entered(weakref.ref(input), input._version, has_gradient, mesh, weakref.ref(whole))
    return whole


def _enter(input: Tensor, mesh: DeviceMesh) -> Tensor:
    if isinstance(input, DTensor):
        gathered = input.redistribute(placements=[Replicate()])
        local: Tensor = gathered.to_local(grad_placements=[Partial()])
        return local
    return enter_split(input, mesh.get_group())


@outside_graphs
def to_sequence(partial: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum the ranks' partial results and leave each with its piece of the sequence (dim 1)."""
    if not splits_sequence(partial.shape[1] if partial.dim() > 1 else 0, mesh):
        return sum_parts(partial, mesh.get_group())
    summed = DTensor.from_local(partial, mesh, [Partial()], run_check=False)
    return summed.redistribute(placements=[Shard(1)])


def splits_sequence(length: int, mesh: DeviceMesh) -> bool:
    """Whether a sequence is split over the ranks: always in training, where an uneven one is refused.

    Without gradients there is little to save, and prompts have any length: uneven ones stay whole.
    """
    if length and length % mesh.size() == 0:
        return True
    if not torch.is_grad_enabled():
        return False
    raise TensorShapeMismatch(
        f"tensor.sequence_parallel: a sequence of {length} does not split over tp {mesh.size()}",
        hint=f"make it a multiple of {mesh.size()} (pad it), or turn tensor.sequence_parallel off",
    )
