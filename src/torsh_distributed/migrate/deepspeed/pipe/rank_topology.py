"""Ranks as a grid with named axes, as scripts of DeepSpeed ask for it, and this rank's place in it."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from torsh_distributed.comm.groups.manager import group_over
from torsh_distributed.errors import InvalidArgument


class ProcessTopology:
    """Ranks in row-major order of their coordinates: the last axis changes fastest."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        kind: Any = namedtuple("ProcessCoord", list(axes))  # type: ignore[misc]
        self.ProcessCoord = kind
        places = itertools.product(*(range(size) for size in dims))
        self.mapping = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at coordinates, all of which are given."""
        if set(coord_kwargs) != set(self.axes):
            raise ValueError("get_rank() does not support slices. Use filter_match())")
        place = self.ProcessCoord(**coord_kwargs)
        if place not in self.mapping:
            raise InvalidArgument(f"coord {coord_kwargs} is outside of the topology", dims=self.dims)
        return self.mapping[place]

    def get_axis_names(self) -> list[str]:
        """The axes, slowest first."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """A rank's coordinates as a name, such as model_00."""
        place = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """The degree of an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """A rank's coordinates, by name."""
        for place, found in self.mapping.items():
            if found == rank:
                return place
        raise ValueError(f"rank {rank} not found in topology.")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The ranks that differ in this axis alone, a list for each group."""
        if axis not in self.axes:
            return []
        others = [one for one in self.axes if one != axis]
        return [
            self.filter_match(**dict(zip(others, place, strict=True)))
            for place in itertools.product(*(range(self.get_dim(one)) for one in others))
        ]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks with these coordinates."""
        return [
            rank
            for place, rank in self.mapping.items()
            if all(getattr(place, axis) == value for axis, value in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at one place of an axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """All ranks."""
        return len(self.mapping)

    @override
    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages × replicas: replicas of a stage are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages × replicas × tensor-parallel ranks."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """This rank's place and groups in a topology; groups are made when they are asked for, by their ranks."""

    def __init__(self, topology: ProcessTopology, process_group: dist.ProcessGroup | None = None) -> None:
        self._topo = topology
        self.global_rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        place = topology.get_coord(self.global_rank)
        self.stage_id = place.pipe
        self.data_parallel_id = place.data if "data" in topology.axes else 0
        self._model_id = place.model if "model" in topology.axes else 0
        self.pipe_parallel_size = max(topology.get_dim("pipe"), 1)
        self.data_parallel_size = max(topology.get_dim("data"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(topology.get_dim("model"), 1)
        self._groups: dict[str, dist.ProcessGroup] = {}

    def _ranks(self, axis: str) -> list[int]:
        for ranks in self._topo.get_axis_comm_lists(axis):
            if self.global_rank in ranks:
                return ranks
        return [self.global_rank]

    def _group(self, axis: str) -> dist.ProcessGroup:
        if axis not in self._groups:
            self._groups[axis] = group_over(self._ranks(axis))
        return self._groups[axis]

    def get_stage_id(self) -> int:
        """This rank's stage."""
        return int(self.stage_id)

    def get_data_parallel_id(self) -> int:
        """Which replica this rank belongs to."""
        return int(self.data_parallel_id)

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of another stage in this rank's replica."""
        place = self._topo.get_coord(self.global_rank)._replace(pipe=stage_id, **kwargs)
        return self._topo.get_rank(**place._asdict())

    def topology(self) -> ProcessTopology:
        """The grid of all ranks."""
        return self._topo

    def get_global_rank(self) -> int:
        """This rank in the world."""
        return self.global_rank

    get_pipe_parallel_rank = get_stage_id
    get_pipeline_model_parallel_rank = get_stage_id
    get_data_parallel_rank = get_data_parallel_id

    def get_pipe_parallel_world_size(self) -> int:
        """The number of stages."""
        return self.pipe_parallel_size

    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        """The ranks of this replica; its ranks call this."""
        return self._group("pipe")

    def get_data_parallel_world_size(self) -> int:
        """The number of replicas."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks with this stage; its ranks call this."""
        return self._group("data")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The ranks with this stage."""
        return self._ranks("data")

    def get_model_parallel_rank(self) -> int:
        """This rank's part of each layer."""
        return int(self._model_id)

    def get_model_parallel_world_size(self) -> int:
        """The number of ranks that split a layer."""
        return self.model_parallel_size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that split this rank's layers; its ranks call this."""
        return self._group("model")

    get_slice_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_slice_parallel_group = get_model_parallel_group
