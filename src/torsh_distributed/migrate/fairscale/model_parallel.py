"""FairScale's groups and layers for split models, as Llama imports them.

Weights are made whole on every rank, from the same random numbers, and cut: seed all ranks of a model group alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional, init
from typing_extensions import override

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.errors import BackendNotInitialized, InvalidArgument
from torsh_distributed.parallel.tensor.regions import enter_split, gather_last, sum_parts, take_last


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that this rank is in."""

    model: dist.ProcessGroup
    data: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    pipeline_ranks: list[int]


_groups: ParallelGroups | None = None


def initialize_model_parallel(
    model_parallel_size_: int,
    pipeline_length: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    ddp_backend: str | None = None,
) -> None:
    """Lay out the world: model groups of neighbours, then pipelines, then replicas; every rank calls this once."""
    global _groups
    if not dist.is_initialized():
        raise BackendNotInitialized("model parallelism needs a process group", hint="call td.init() first")
    if _groups is not None:
        raise InvalidArgument("model parallelism is initialized already", hint="call destroy_model_parallel() before")
    world_size = dist.get_world_size()
    model_size = min(int(model_parallel_size_), world_size)
    if world_size % (model_size * pipeline_length):
        raise InvalidArgument(
            f"model {model_size} × pipeline {pipeline_length} does not divide the {world_size} ranks",
            hint="start a multiple of their product",
        )
    grid = torch.arange(world_size).view(-1, pipeline_length, model_size)
    data = _own_group(grid.permute(1, 2, 0).flatten(0, 1).tolist(), ddp_backend)
    model = _own_group(grid.flatten(0, 1).tolist(), model_parallel_backend)
    pipelines = grid.transpose(1, 2).flatten(0, 1).tolist()
    pipeline = _own_group(pipelines, pipeline_backend)
    ranks = next(ranks for ranks in pipelines if dist.get_rank() in ranks)
    _groups = ParallelGroups(model, data, pipeline, ranks)


def _own_group(parts: list[list[int]], backend: str | None) -> dist.ProcessGroup:
    """The group of this rank; all ranks make all groups, in the same order."""
    made: list[dist.ProcessGroup] = [dist.new_group(ranks, backend=backend) for ranks in parts]
    return next(group for group, ranks in zip(made, parts, strict=True) if dist.get_rank() in ranks)


def _required() -> ParallelGroups:
    if _groups is None:
        raise BackendNotInitialized(
            "model parallelism is not initialized", hint="call initialize_model_parallel(size) first"
        )
    return _groups


def model_parallel_is_initialized() -> bool:
    """Whether the groups are there."""
    return _groups is not None


def destroy_model_parallel() -> None:
    """Forget the groups."""
    global _groups
    _groups = None


def get_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that split each layer with this one."""
    return _required().model


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks with the same part of the model."""
    return _required().data


def get_pipeline_parallel_group() -> dist.ProcessGroup:
    """The ranks of this pipeline."""
    return _required().pipeline


def get_pipeline_parallel_ranks() -> list[int]:
    """The ranks of this pipeline, as ranks of the world."""
    return _required().pipeline_ranks


def get_model_parallel_world_size() -> int:
    """Ranks that split each layer."""
    return _required().model.size()


def get_model_parallel_rank() -> int:
    """This rank among them."""
    return _required().model.rank()


def get_model_parallel_src_rank() -> int:
    """The first of them, as a rank of the world."""
    return dist.get_global_rank(_required().model, 0)


def get_data_parallel_world_size() -> int:
    """Replicas of this part of the model."""
    return _required().data.size()


def get_data_parallel_rank() -> int:
    """This rank among them."""
    return _required().data.rank()


InitMethod = Callable[[Tensor], Tensor]


def copy_to_model_parallel_region(input_: Tensor) -> Tensor:
    """The input of a split layer, equal on all ranks; gradients are summed."""
    return enter_split(input_, get_model_parallel_group())


def reduce_from_model_parallel_region(input_: Tensor) -> Tensor:
    """The sum over ranks; the gradient is unchanged."""
    return sum_parts(input_, get_model_parallel_group())


def scatter_to_model_parallel_region(input_: Tensor) -> Tensor:
    """This rank's piece of the last dim; gradients are gathered."""
    return take_last(input_, get_model_parallel_group())


def gather_from_model_parallel_region(input_: Tensor) -> Tensor:
    """The whole last dim; each rank takes its piece of the gradient."""
    whole = input_.shape[-1] * get_model_parallel_world_size()
    return gather_last(input_, whole, get_model_parallel_group())


class _SplitLinear(nn.Module):
    """A linear layer of which each rank holds a part of the weight, cut along `dim`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        init_method: InitMethod,
        *,
        dim: int,
        stride: int,
        bias_size: int | None,
        keeps_whole: bool,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        whole = _whole(out_features, in_features, init_method)
        self.weight = nn.Parameter(_cut(whole, dim, stride))
        self.bias = None if bias_size is None else nn.Parameter(torch.zeros(bias_size))
        self.master_weight = whole if keeps_whole else None


class FairscaleColumnLinear(_SplitLinear):
    """`ColumnParallelLinear`: the outputs are split; `gather_output` joins them."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: InitMethod = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        share = _share(out_features, "out_features")
        super().__init__(
            in_features,
            out_features,
            init_method,
            dim=0,
            stride=stride,
            bias_size=share if bias else None,
            keeps_whole=keep_master_weight_for_test,
        )
        self.gather_output, self.output_size_per_partition = gather_output, share

    def get_master_weight(self) -> Tensor:
        """The whole weight; every rank of the model group calls this."""
        return gather_from_model_parallel_region(self.weight.detach().t()).t()

    @override
    def forward(self, input_: Tensor) -> Tensor:
        part = functional.linear(copy_to_model_parallel_region(input_), self.weight, self.bias)
        return gather_from_model_parallel_region(part) if self.gather_output else part


class FairscaleRowLinear(_SplitLinear):
    """`RowParallelLinear`: the inputs are split, the outputs summed."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        share = _share(in_features, "in_features")
        super().__init__(
            in_features,
            out_features,
            init_method,
            dim=1,
            stride=stride,
            bias_size=out_features if bias else None,
            keeps_whole=keep_master_weight_for_test,
        )
        self.input_is_parallel, self.input_size_per_partition = input_is_parallel, share

    def get_master_weight(self) -> Tensor:
        """The whole weight; every rank of the model group calls this."""
        return gather_from_model_parallel_region(self.weight.detach())

    @override
    def forward(self, input_: Tensor) -> Tensor:
        part = input_ if self.input_is_parallel else scatter_to_model_parallel_region(input_)
        out = reduce_from_model_parallel_region(functional.linear(part, self.weight))
        return out if self.bias is None else out + self.bias


class _SplitEmbedding(nn.Module):
    """An embedding of which each rank holds a part, cut along `dim`."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: InitMethod,
        *,
        dim: int,
        scale_grad_by_freq: bool,
        sparse: bool,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.weight = nn.Parameter(_cut(_whole(num_embeddings, embedding_dim, init_method), dim))


class VocabParallelEmbedding(_SplitEmbedding):
    """An embedding whose rows are split over the ranks."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = init.xavier_normal_,
    ) -> None:
        _refuse(padding_idx=padding_idx, max_norm=max_norm)
        share = _share(num_embeddings, "num_embeddings")
        super().__init__(
            num_embeddings, embedding_dim, init_method, dim=0, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
        )
        self.num_embeddings_per_partition = share
        self.vocab_start_index = get_model_parallel_rank() * share
        self.vocab_end_index = self.vocab_start_index + share

    @override
    def forward(self, input_: Tensor) -> Tensor:
        is_elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        rows = (input_ - self.vocab_start_index).masked_fill(is_elsewhere, 0)
        found = functional.embedding(rows, self.weight, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse)
        return reduce_from_model_parallel_region(found.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))


class FairscaleNarrowEmbedding(_SplitEmbedding):
    """`ParallelEmbedding`: the columns are split over the ranks, and joined."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        _refuse(max_norm=max_norm)
        share = _share(embedding_dim, "embedding_dim")
        super().__init__(
            num_embeddings, embedding_dim, init_method, dim=1, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
        )
        self.padding_idx, self.embedding_dim_per_partition = padding_idx, share

    @override
    def forward(self, input_: Tensor) -> Tensor:
        part = functional.embedding(
            input_, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse
        )
        return gather_from_model_parallel_region(part)


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """The cross entropy of each target, from logits whose last dim, the vocabulary, is split over the ranks."""
    group = get_model_parallel_group()
    share = vocab_parallel_logits.shape[-1]
    first = get_model_parallel_rank() * share
    largest = all_reduce(vocab_parallel_logits.detach().amax(-1), op="max", group=group)
    logits = vocab_parallel_logits - largest.unsqueeze(-1)
    is_elsewhere = (target < first) | (target >= first + share)
    own = (target - first).masked_fill(is_elsewhere, 0)
    picked = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(is_elsewhere, 0.0)
    return sum_parts(logits.exp().sum(-1), group).log() - sum_parts(picked, group)


def _share(size: int, name: str) -> int:
    ranks = get_model_parallel_world_size()
    if size % ranks:
        raise InvalidArgument(
            f"{name} {size} cannot be split over {ranks} ranks", hint="choose a multiple of the ranks"
        )
    return size // ranks


def _whole(rows: int, columns: int, init_method: InitMethod) -> Tensor:
    weight = torch.empty(rows, columns)
    init_method(weight)
    return weight


def _cut(whole: Tensor, dim: int, stride: int = 1) -> Tensor:
    """This rank's part; with a stride every n-th of so many times smaller parts."""
    ranks, rank = get_model_parallel_world_size(), get_model_parallel_rank()
    parts = whole.chunk(ranks * stride, dim=dim)
    return torch.cat(parts[rank::ranks], dim=dim).contiguous()


def _refuse(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise InvalidArgument(f"{name} of a split embedding is not supported", hint="leave it out", **{name: value})
