"""Embeddings split over the ranks of a mesh axis: by rows (the vocabulary) or by columns."""

from __future__ import annotations

from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.tensor.regions import gather_last, sum_parts, to_sequence
from torsh_distributed.parallel.tensor.split_params import TensorCut, adopt, bounds, class_for, split_param


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
        kind = class_for(cls, embedding, nn.Embedding)
        layer = cast(Self, kind.__new__(kind))
        adopt(layer, embedding)
        layer._split(mesh, sequence_output=sequence_output)
        return layer

    def _split(self, mesh: DeviceMesh, *, sequence_output: bool) -> None:
        require_plain_table(self)
        self.mesh, self.cut, self.sequence_output = mesh, TensorCut(0), sequence_output
        group = mesh.get_group()
        self.whole_embeddings = self.num_embeddings
        self._start, self._stop = bounds(self.num_embeddings, rank=group.rank(), size=group.size())
        split_param(self, "weight", self.cut, group)
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


class NarrowEmbedding(nn.Embedding):
    """An embedding whose columns are split: each rank looks up a piece of every vector, and the pieces are gathered.

    in: ids, equal on every rank. out: (*ids.shape, embedding_dim), whole.
    """

    mesh: DeviceMesh

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, mesh: DeviceMesh) -> Self:
        """The same table, split; it reuses the parameter of `embedding`, which keeps its identity."""
        kind = class_for(cls, embedding, nn.Embedding)
        layer = cast(Self, kind.__new__(kind))
        adopt(layer, embedding)
        require_plain_table(layer)
        layer.mesh = mesh
        split_param(layer, "weight", TensorCut(1), mesh.get_group())
        return layer

    @override
    def forward(self, input: Tensor) -> Tensor:
        part = functional.embedding(input, self.weight, self.padding_idx)
        return gather_last(part, self.embedding_dim, self.mesh.get_group())


def require_plain_table(table: nn.Embedding) -> None:
    """Refuse an embedding whose options need the whole table."""
    unsupported = [name for name in ("max_norm", "sparse", "scale_grad_by_freq") if getattr(table, name)]
    if unsupported:
        raise InvalidArgument(
            f"an embedding with {' and '.join(unsupported)} cannot be split over its vocabulary",
            hint="override it with 'replicated', or drop the option",
        )
