"""Converts activations between whole and split: the four operations of tensor parallelism, with their backward.

Backward does to the gradient the opposite of what forward does to the activation. Every rank of the group calls them in
the same order.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from typing_extensions import override

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.errors import TensorShapeMismatch
from torsh_distributed.parallel.compiling import outside_graphs
from torsh_distributed.parallel.tensor.split_params import TensorCut

LAST = TensorCut(-1)


@outside_graphs
def enter_split(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A whole activation, equal on all ranks, as input of a split layer. Backward: gradients are summed."""
    out: Tensor = _EnterSplit.apply(whole, group)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


@outside_graphs
def sum_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of what each computed from its piece. Backward: the gradient is unchanged."""
    out: Tensor = _SumParts.apply(part, group)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


@outside_graphs
def gather_last(part: Tensor, whole: int, group: dist.ProcessGroup, *, cut: TensorCut = LAST) -> Tensor:
    """The whole last dim, of length `whole`, from the ranks' pieces. Backward: each rank takes its piece."""
    out: Tensor = _GatherLast.apply(part, whole, group, cut)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


@outside_graphs
def take_last(whole: Tensor, group: dist.ProcessGroup, *, cut: TensorCut = LAST) -> Tensor:
    """This rank's piece of the last dim of a whole activation. Backward: the pieces' gradients are gathered."""
    out: Tensor = _TakeLast.apply(whole, group, cut)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


class _EnterSplit(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_reduce(grads[0].contiguous().clone(), group=ctx.group), None


class _SumParts(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(part.contiguous().clone(), group=group)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, whole: int, group: dist.ProcessGroup, cut: TensorCut) -> Tensor:
        ctx.group, ctx.cut = group, cut
        return _gathered(part, whole, group, cut)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _piece(grads[0], ctx.group, ctx.cut), None, None, None


class _TakeLast(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup, cut: TensorCut) -> Tensor:
        ctx.group, ctx.whole, ctx.cut = group, whole.shape[-1], cut
        return _piece(whole, group, cut)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gathered(grads[0], ctx.whole, ctx.group, ctx.cut), None, None


def _piece(whole: Tensor, group: dist.ProcessGroup, cut: TensorCut) -> Tensor:
    return cut.part(whole, rank=group.rank(), size=group.size())


def _gathered(part: Tensor, whole: int, group: dist.ProcessGroup, cut: TensorCut) -> Tensor:
    """The whole last dim from the pieces, which are padded to one length to be sent."""
    lengths = [cut.length(whole, rank=rank, size=group.size()) for rank in range(group.size())]
    missing = lengths[0] - part.shape[-1]
    sent = torch.nn.functional.pad(part, (0, missing)) if missing else part.contiguous()
    received = [torch.empty_like(sent) for _ in lengths]
    dist.all_gather(received, sent, group=group)
    return cut.join([piece[..., :length] for piece, length in zip(received, lengths, strict=True)])


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
