"""Layers split over the ranks of a mesh axis, with the output and gradients of the whole layer.

Parameters are plain tensors, only this rank's piece: they work with any optimizer, DDP, FSDP2 and pipelines.
Activations between two layers of a pair are one of

- whole: a plain tensor, equal on every rank;
- local: a plain tensor with this rank's piece of the last dim, for element-wise code;
- sharded: a DTensor, which has the whole shape for user code and stays correct through views and attention.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch
from torsh_distributed.parallel.tensor.cut import TensorCut, bounds
from torsh_distributed.parallel.tensor.regions import enter_split, gather_last, sum_parts, take_last

Activation = Literal["whole", "local", "sharded"]

keeps_logits_split: ContextVar[bool] = ContextVar("keeps_logits_split", default=False)
"""Whether the loss can work with split logits: then a head returns them split, otherwise whole."""


# Older DTensor versions cannot split the output of a fused layer into heads; there it is gathered, and every rank
# computes all heads: correct, but slower. Drop with support for torch < 2.13.
_VIEWS_SECTIONS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


class ColumnParallelLinear(nn.Linear):
    """A linear layer whose output features are split: rank r computes its piece of them from the whole input.

    in: (…, in_features), whole; or a DTensor split along the sequence. out: (…, out_features) whole, or this rank's
    piece of it. `sections` are the lengths of matrices fused into one, such as query, key and value.
    """

    is_head = False
    """Whether the output is logits: whole, unless the loss takes them split."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh,
        gather_output: bool = True,
        output: Activation | None = None,
        sections: tuple[int, ...] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._split(mesh, output or ("whole" if gather_output else "local"), sections)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, mesh: DeviceMesh, *, output: Activation = "whole", sections: tuple[int, ...] = ()
    ) -> Self:
        """The same layer, split; it reuses the parameters of `linear`, which keep their identity."""
        layer = cls.__new__(cls)
        _adopt(layer, linear)
        layer._split(mesh, output, sections)
        return layer

    def _split(self, mesh: DeviceMesh, output: Activation, sections: tuple[int, ...]) -> None:
        self.mesh, self.output, self.cut = mesh, output, TensorCut(0, sections)
        self.whole_features = self.out_features
        split_param(self.weight, self.cut, mesh.get_group())
        if self.bias is not None:
            split_param(self.bias, self.cut, mesh.get_group())
        self.out_features = self.weight.shape[0]
        if len(set(sections)) > 1 and output == "sharded":
            raise InvalidArgument(
                "a fused layer of unequal sections has no sharded output: DTensor cannot describe how it is split",
                hint='use output="whole" or "local"',
                sections=sections,
            )
        if sections and output == "sharded" and not _VIEWS_SECTIONS:
            self.output = "whole"

    @override
    def forward(self, input: Tensor) -> Tensor:
        group = self.mesh.get_group()
        part = functional.linear(whole_input(input, self.mesh), self.weight, self.bias)
        if self.output == "whole" or (self.is_head and not keeps_logits_split.get()):
            return gather_last(part, self.whole_features, group, cut=TensorCut(-1, self.cut.sections))
        return part if self.output == "local" else self._sharded(part)

    def _sharded(self, part: Tensor) -> Tensor:
        dim, shape = part.dim() - 1, torch.Size([*part.shape[:-1], self.whole_features])
        placement: Placement = Shard(dim)
        if self.cut.sections:
            placement = _StridedShard(dim, split_factor=len(self.cut.sections))
        return _from_local(part, self.mesh, placement, shape)


class RowParallelLinear(nn.Linear):
    """A linear layer whose input features are split: ranks compute partial outputs, which are summed.

    in: (…, in_features) whole, this rank's piece of it, or a DTensor. out: (…, out_features) whole; with
    `sequence_output` a DTensor split along the sequence (dim 1).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh,
        input_is_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._split(mesh, input_is_parallel=input_is_parallel, sequence_output=False)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, mesh: DeviceMesh, *, input_is_parallel: bool = False, sequence_output: bool = False
    ) -> Self:
        """The same layer, split; it reuses the parameters of `linear`, which keep their identity."""
        layer = cls.__new__(cls)
        _adopt(layer, linear)
        layer._split(mesh, input_is_parallel=input_is_parallel, sequence_output=sequence_output)
        return layer

    def _split(self, mesh: DeviceMesh, *, input_is_parallel: bool, sequence_output: bool) -> None:
        self.mesh, self.cut = mesh, TensorCut(1)
        self.input_is_parallel, self.sequence_output = input_is_parallel, sequence_output
        self.whole_features = self.in_features
        split_param(self.weight, self.cut, mesh.get_group())
        if self.bias is not None:
            replicate_param(self.bias, mesh.get_group())
        self.in_features = self.weight.shape[1]

    @override
    def forward(self, input: Tensor) -> Tensor:
        group = self.mesh.get_group()
        partial = functional.linear(self._local(input, group), self.weight)
        if self.sequence_output:
            out = to_sequence(partial, self.mesh)
            if not isinstance(out, DTensor):
                return out if self.bias is None else out + self.bias
            # As a DTensor the bias has its gradient summed over the ranks, each of which sees only its own positions.
            return out if self.bias is None else out + _replicated(self.bias, self.mesh)
        out = sum_parts(partial, group)
        return out if self.bias is None else out + self.bias

    def _local(self, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        if isinstance(input, DTensor):
            dim = input.dim() - 1
            local: Tensor = input.redistribute(placements=[Shard(dim)]).to_local()
            return local
        width = input.shape[-1]
        if not self.input_is_parallel and width == self.whole_features:
            return take_last(input, group)
        if width != self.in_features:
            raise TensorShapeMismatch(
                "the input of a row-parallel layer is neither whole nor this rank's piece",
                hint="split the layer before it as column-parallel, or override this one with 'replicated'",
                width=width,
                whole=self.whole_features,
                piece=self.in_features,
            )
        return input


class ParallelEmbedding(nn.Embedding):
    """An embedding whose vocabulary is split: each rank looks up the ids it holds, and the results are summed.

    in: ids, equal on every rank. out: (*ids.shape, embedding_dim) whole; with `sequence_output` a DTensor split along
    the sequence (dim 1).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        mesh: DeviceMesh,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._split(mesh, sequence_output=False)

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, mesh: DeviceMesh, *, sequence_output: bool = False) -> Self:
        """The same table, split; it reuses the parameter of `embedding`, which keeps its identity."""
        layer = cls.__new__(cls)
        _adopt(layer, embedding)
        layer._split(mesh, sequence_output=sequence_output)
        return layer

    def _split(self, mesh: DeviceMesh, *, sequence_output: bool) -> None:
        unsupported = [name for name in ("max_norm", "sparse", "scale_grad_by_freq") if getattr(self, name)]
        if unsupported:
            raise InvalidArgument(
                f"an embedding with {' and '.join(unsupported)} cannot be split over its vocabulary",
                hint="override it with 'replicated', or drop the option",
            )
        self.mesh, self.cut, self.sequence_output = mesh, TensorCut(0), sequence_output
        group = mesh.get_group()
        self.whole_embeddings = self.num_embeddings
        self._start, self._stop = bounds(self.num_embeddings, rank=group.rank(), size=group.size())
        split_param(self.weight, self.cut, group)
        self.num_embeddings = self.weight.shape[0]

    @override
    def forward(self, input: Tensor) -> Tensor:
        group = self.mesh.get_group()
        is_here = (input >= self._start) & (input < self._stop)
        if self.num_embeddings:
            padding = self.padding_idx
            here = padding - self._start if padding is not None and self._start <= padding < self._stop else None
            found = functional.embedding((input - self._start).where(is_here, 0), self.weight, here)
        else:  # more ranks than rows: this one holds none, but its gradient must exist
            found = self.weight.sum() + self.weight.new_zeros(*input.shape, self.embedding_dim)
        partial = found * is_here.unsqueeze(-1)
        return to_sequence(partial, self.mesh) if self.sequence_output else sum_parts(partial, group)


class _Entered(NamedTuple):
    """The activation that entered a split layer last, and as what. Weak: nothing lives longer for it."""

    input: weakref.ref[Tensor]
    version: int
    has_gradient: bool
    mesh: DeviceMesh
    whole: weakref.ref[Tensor]


_last_entered: _Entered | None = None


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


def split_param(param: Tensor, cut: TensorCut, group: dist.ProcessGroup) -> None:
    """Reduce a parameter to this rank's piece of the first rank's values; a tied one is cut once."""
    if getattr(param, _MARK, None) == cut:
        return
    if hasattr(param, _MARK):
        raise InvalidArgument(
            "a tied parameter would be cut in two ways",
            hint="override one of the layers that share it, so both are cut along the same dim",
            first=getattr(param, _MARK),
            second=cut,
        )
    replicate_param(param, group)
    param.data = cut.part(param.data, rank=group.rank(), size=group.size())
    setattr(param, _MARK, cut)


def replicate_param(param: Tensor, group: dist.ProcessGroup) -> None:
    """Broadcast the first rank's values to every rank."""
    if param.device.type != "meta" and not hasattr(param, _MARK):
        param.data = param.data.contiguous()
        dist.broadcast(param.data, group=group, group_src=0)


_MARK = "_torsh_cut"
"""Set on a parameter that holds a piece: how it was cut. Keeps tied parameters from being cut twice."""


def _adopt(layer: nn.Module, source: nn.Module) -> None:
    """Give `layer` the same parameters, buffers, hooks and settings as `source`."""
    layer.__dict__.update(source.__dict__)
    layer._parameters = dict(source._parameters)


def _from_local(part: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, [placement], run_check=False, shape=shape, stride=stride)


def _replicated(value: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
