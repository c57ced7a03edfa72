"""The mesh of a running world: owns the groups along its axes and torch's DeviceMesh over them."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torsh_distributed import events
from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.groups.manager import group_over
from torsh_distributed.errors import BackendNotInitialized, InvalidArgument
from torsh_distributed.parallel.mesh.layout import DATA_AXES, MeshLayout
from torsh_distributed.plan.sections.mesh import MeshConfig

_log = logging.getLogger(__name__)


class Mesh:
    """This rank's place in the mesh, and a process group along any axis or set of axes.

    Every rank of the world (or of `group`, which is laid out instead) constructs one and asks for the same groups in
    the same order: a group is created when first asked for. Axes with one rank cost nothing; a group that spans all
    ranks is the existing one.
    """

    def __init__(
        self,
        layout: MeshLayout | MeshConfig,
        *,
        device_type: str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not process_group.is_initialized():
            raise BackendNotInitialized("a mesh with groups needs the process group")
        self._everyone = resolve_group(group)
        self._ranks = dist.get_process_group_ranks(self._everyone)
        world_size = len(self._ranks)
        self.layout = layout if isinstance(layout, MeshLayout) else MeshLayout(layout.resolve(world_size))
        if self.layout.world_size != world_size:
            raise InvalidArgument(
                f"{self.layout.config.equation}, but the world has {world_size} ranks",
                hint="resolve the mesh for this world: config.resolve(world_size)",
            )
        self.rank = self._everyone.rank()
        """This rank's index in the layout: its rank in the world, or in `group`."""
        self.device_type = device_type
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._device_mesh: DeviceMesh | None = None
        _warn_of_crossing(self.layout, self._ranks)

    @property
    def coordinates(self) -> dict[str, int]:
        """Axis to this rank's index."""
        return self.layout.coordinates(self.rank)

    @property
    def data_rank(self) -> int:
        """Which part of every batch this rank works on."""
        return self.layout.data_part(self.rank)

    @property
    def data_degree(self) -> int:
        """The number of parts a batch is divided into."""
        return self.layout.config.data_degree

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that together work on a whole batch: losses are averaged over it."""
        return self.group(*DATA_AXES)

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one along `axes` only, in the mesh's order."""
        members = self.layout.group_ranks(self.rank, *axes)
        used = tuple(axis for axis in self.layout.used_axes if axis in axes)
        if used not in self._groups:
            is_whole = len(members) == len(self._ranks)
            self._groups[used] = self._everyone if is_whole else group_over([self._ranks[one] for one in members])
        return self._groups[used]

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's view: a dimension for each axis with more than one rank, outermost first; only `shard` if none has.

        Slices used together (sharding and tensor parallelism) come from this one: `device_mesh["dp", "shard"]`.
        """
        if self._device_mesh is None:
            axes = self.layout.used_axes or ("shard",)
            shape = [self.layout.degree(axis) for axis in axes]
            grid = torch.tensor(self._ranks, dtype=torch.int).view(shape)
            self._device_mesh = DeviceMesh.from_group(
                [self.group(axis) for axis in axes], self.device_type, mesh=grid, mesh_dim_names=axes
            )
        return self._device_mesh

    def slice(self, *axes: str) -> DeviceMesh:
        """torch's view of some axes, in the mesh's order, without those of one rank; if all are, only the last."""
        used = tuple(axis for axis in self.layout.used_axes if axis in axes)
        if used:
            return self.device_mesh[used]
        return DeviceMesh.from_group(self.group(), self.device_type, mesh_dim_names=(axes[-1],))

    def grid(self, outer: tuple[str, ...], inner: str) -> DeviceMesh:
        """torch's view in two dimensions: the ranks along all of `outer` as one, then those along `inner`.

        For replicas of shards where several axes replicate. One dimension if none of `outer` is used.
        """
        if self.layout.degree(*outer) == 1:
            return self.slice(inner)
        rows = [self.layout.group_ranks(member, inner) for member in self.layout.group_ranks(self.rank, *outer)]
        ranks = torch.tensor([[self._ranks[one] for one in row] for row in rows], dtype=torch.int)
        groups = [self.group(*outer), self.group(inner)]
        return DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=("replica", inner))


def _warn_of_crossing(layout: MeshLayout, ranks: list[int]) -> None:
    """Tensor parallelism communicates in every layer: over a network it is slow, and usually a mistake."""
    try:
        nodes = process_group.roster().nodes
    except BackendNotInitialized:
        return  # a world that torch alone started: the nodes of its ranks are not known
    crossing = layout.crossing_groups("tp", [nodes[rank] for rank in ranks])
    if crossing:
        message = (
            f"mesh.tp {layout.degree('tp')}: {len(crossing)} tensor-parallel groups span more than one node, such as"
            f" ranks {', '.join(str(ranks[one]) for one in crossing[0])}; every layer then waits for the network"
        )
        _log.warning("%s", message)
        events.emit(events.LogEvent(level="warning", message=message))
