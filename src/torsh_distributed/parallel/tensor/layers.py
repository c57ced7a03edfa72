"""Layers split over the ranks of a mesh axis, with the output and gradients of the whole layer.

Parameters are plain tensors, only this rank's piece: they work with any optimizer, DDP, FSDP2 and pipelines.
Activations between two layers of a pair are one of

- whole: a plain tensor, equal on every rank;
- local: a plain tensor with this rank's piece of the last dim, for element-wise code;
- sharded: a DTensor, which has the whole shape for user code and stays correct through views and attention.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch
from torsh_distributed.parallel.models.structure import is_transposed, widths
from torsh_distributed.parallel.random_streams import begin_local_stream, end_local_stream
from torsh_distributed.parallel.tensor.regions import gather_last, sum_parts, take_last, to_sequence, whole_input
from torsh_distributed.parallel.tensor.split_params import TensorCut, adopt, class_for, replicate_param, split_param
from torsh_distributed.parallel.torch_internals import _StridedShard

Activation = Literal["whole", "local", "sharded"]

_Layer = TypeVar("_Layer", "ColumnParallelLinear", "RowParallelLinear")

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
    is_transposed = False
    """Whether the matrix is kept as (in, out)."""
    draws_numbers = False
    """Whether random numbers are drawn for the pieces that follow, so each rank needs its own."""

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
        cls, linear: nn.Module, mesh: DeviceMesh, *, output: Activation = "whole", sections: tuple[int, ...] = ()
    ) -> Self:
        """The same layer, split; it reuses the parameters of `linear`, which keep their identity."""
        layer = cast(Self, _as_linear(cls, linear))
        layer._split(mesh, output, sections)
        return layer

    def _split(self, mesh: DeviceMesh, output: Activation, sections: tuple[int, ...]) -> None:
        self.mesh, self.output, self.cut = mesh, output, TensorCut(int(self.is_transposed), sections)
        self.whole_features = self.out_features
        split_param(self, "weight", self.cut, mesh.get_group())
        if self.bias is not None:
            split_param(self, "bias", TensorCut(0, sections), mesh.get_group())
        self.out_features = self.weight.shape[self.cut.dim]
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
        matrix = self.weight.t() if self.is_transposed else self.weight
        part = functional.linear(whole_input(input, self.mesh), matrix, self.bias)
        if self.output == "whole" or (self.is_head and not keeps_logits_split.get()):
            return gather_last(part, self.whole_features, group, cut=TensorCut(-1, self.cut.sections))
        if self.output == "sharded":
            return self._sharded(part)
        if self.draws_numbers and self.training:
            begin_local_stream(part.device, group.rank())
        return part

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

    is_transposed = False
    """Whether the matrix is kept as (in, out)."""

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
        cls,
        linear: nn.Module,
        mesh: DeviceMesh,
        *,
        input_is_parallel: bool = False,
        sequence_output: bool = False,
        sections: tuple[int, ...] = (),
    ) -> Self:
        """The same layer, split; it reuses the parameters of `linear`, which keep their identity."""
        layer = cast(Self, _as_linear(cls, linear))
        layer._split(mesh, input_is_parallel=input_is_parallel, sequence_output=sequence_output, sections=sections)
        return layer

    def _split(
        self, mesh: DeviceMesh, *, input_is_parallel: bool, sequence_output: bool, sections: tuple[int, ...] = ()
    ) -> None:
        self.mesh, self.cut = mesh, TensorCut(int(not self.is_transposed), sections)
        self.input_is_parallel, self.sequence_output = input_is_parallel, sequence_output
        self.whole_features = self.in_features
        split_param(self, "weight", self.cut, mesh.get_group())
        if self.bias is not None:
            replicate_param(self.bias, mesh.get_group())
        self.in_features = self.weight.shape[self.cut.dim]

    @override
    def forward(self, input: Tensor) -> Tensor:
        group = self.mesh.get_group()
        end_local_stream()
        matrix = self.weight.t() if self.is_transposed else self.weight
        partial = functional.linear(self._local(input, group), matrix)
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
            return take_last(input, group, cut=TensorCut(-1, self.cut.sections))
        if width != self.in_features:
            raise TensorShapeMismatch(
                "the input of a row-parallel layer is neither whole nor this rank's piece",
                hint="split the layer before it as column-parallel, or override this one with 'replicated'",
                width=width,
                whole=self.whole_features,
                piece=self.in_features,
            )
        return input


def _as_linear(kind: type[_Layer], source: nn.Module) -> _Layer:
    """A layer of this kind with the parameters of a linear layer; also of one that keeps its matrix transposed."""
    chosen = class_for(kind, source, nn.Linear)
    layer = chosen.__new__(chosen)
    assert isinstance(layer, kind), "class_for extends it"
    adopt(layer, source)
    found = widths(source)
    assert found is not None, "the plan checks this"
    layer.in_features, layer.out_features = found
    layer.is_transposed = is_transposed(source)
    return layer


def _from_local(part: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, [placement], run_check=False, shape=shape, stride=stride)


def _replicated(value: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
