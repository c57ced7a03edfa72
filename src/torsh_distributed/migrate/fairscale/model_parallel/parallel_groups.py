"""The groups of FairScale's model parallelism: ranks as data × pipeline × model, neighbours in one model group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from torsh_distributed.errors import BackendNotInitialized, InvalidArgument


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
