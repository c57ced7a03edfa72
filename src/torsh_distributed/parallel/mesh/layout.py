"""Where each rank is in the mesh: arithmetic only, for any world size, without a process group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torsh_distributed.errors import InvalidArgument, RankOutOfBounds
from torsh_distributed.plan.sections.mesh import MeshConfig

MESH_ORDER = ("dp", "pp", "shard", "ep", "cp", "tp")
"""Axes from the outermost to the innermost: neighbouring ranks differ in tp, which communicates most, so its groups
stay inside a node; replicas, which communicate once a step, are farthest apart."""

DATA_AXES = ("dp", "shard", "ep")
"""Along these every rank has different samples."""

GRADIENT_AXES = (*DATA_AXES, "cp")
"""Along these ranks hold the same parameters (or shards of them) and see different tokens: gradients are averaged."""

REPLICA_AXES = tuple(axis for axis in GRADIENT_AXES if axis != "ep")
"""Along these ranks hold the same experts, or shards of them; along `ep` they hold different ones."""


@dataclass(frozen=True)
class MeshLayout:
    """Ranks as a grid of named axes: rank to coordinates and back, groups along axes, neighbours.

    `config` has no -1 left: it is what `MeshConfig.resolve(world_size)` returned.
    """

    config: MeshConfig

    def __post_init__(self) -> None:
        if min(self.config.degrees.values()) < 1:
            raise InvalidArgument(
                "the mesh still has an unresolved degree",
                hint="resolve it first: config.resolve(world_size)",
                equation=self.config.equation,
            )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.config.degrees.values())

    @property
    def used_axes(self) -> tuple[str, ...]:
        """The axes with more than one rank, outermost first."""
        return tuple(axis for axis in MESH_ORDER if self.degree(axis) > 1)

    def degree(self, *axes: str) -> int:
        """The number of ranks along an axis, or in the grid that several span."""
        return math.prod(self.config.degrees[axis] for axis in self._checked(axes))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis to index of a rank, outermost first."""
        if not 0 <= rank < self.world_size:
            raise RankOutOfBounds(
                f"rank {rank} is outside 0..{self.world_size - 1}", rank=rank, world_size=self.world_size
            )
        found = {}
        for axis in reversed(MESH_ORDER):
            rank, found[axis] = divmod(rank, self.degree(axis))
        return {axis: found[axis] for axis in MESH_ORDER}

    def rank_at(self, **coordinates: int) -> int:
        """The rank at these coordinates; axes left out are 0."""
        self._checked(coordinates)
        rank = 0
        for axis in MESH_ORDER:
            index, degree = coordinates.get(axis, 0), self.degree(axis)
            if not 0 <= index < degree:
                raise RankOutOfBounds(
                    f"{axis} {index} is outside 0..{degree - 1}", axis=axis, index=index, degree=degree
                )
            rank = rank * degree + index
        return rank

    def group_ranks(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along these axes, itself included, in the mesh's order."""
        chosen = self._checked(axes)
        first = rank - sum(
            index * self._strides[axis] for axis, index in self.coordinates(rank).items() if axis in chosen
        )
        return tuple(first + offset for offset in self._offsets(chosen))

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """All groups along these axes; each rank is in exactly one."""
        chosen = self._checked(axes)
        offsets = self._offsets(chosen)
        for first in self._offsets([axis for axis in MESH_ORDER if axis not in chosen]):
            yield tuple(first + offset for offset in offsets)

    def data_part(self, rank: int) -> int:
        """Which part of every batch a rank works on, of `config.data_degree` parts."""
        found = self.coordinates(rank)
        part = 0
        for axis in MESH_ORDER:
            if axis in DATA_AXES:
                part = part * self.degree(axis) + found[axis]
        return part

    def is_head(self, rank: int, axis: str) -> bool:
        """Whether the rank is the first along the axis: the one that logs, saves, or feeds the pipeline."""
        return self.coordinates(rank)[self._checked((axis,))[0]] == 0

    def is_tail(self, rank: int, axis: str) -> bool:
        """Whether the rank is the last along the axis: in the pipeline, the one that has the loss."""
        return self.coordinates(rank)[self._checked((axis,))[0]] == self.degree(axis) - 1

    def next_rank(self, rank: int, axis: str) -> int | None:
        """The next rank along the axis; None at its end."""
        return None if self.is_tail(rank, axis) else self._shifted(rank, axis, 1)

    def previous_rank(self, rank: int, axis: str) -> int | None:
        """The previous rank along the axis; None at its start."""
        return None if self.is_head(rank, axis) else self._shifted(rank, axis, -1)

    def crossing_groups(self, axis: str, nodes: Sequence[object]) -> list[tuple[int, ...]]:
        """The groups along an axis whose ranks are on more than one node; `nodes[rank]` identifies a rank's node."""
        return [members for members in self.groups(axis) if len({nodes[rank] for rank in members}) > 1]

    @cached_property
    def _strides(self) -> dict[str, int]:
        """The distance in ranks between neighbours along each axis."""
        strides, stride = {}, 1
        for axis in reversed(MESH_ORDER):
            strides[axis] = stride
            stride *= self.config.degrees[axis]
        return strides

    def _offsets(self, axes: Sequence[str]) -> list[int]:
        """The ranks of the grid that these axes span, starting at rank 0, in order."""
        steps = [
            range(0, self.degree(axis) * self._strides[axis], self._strides[axis])
            for axis in MESH_ORDER
            if axis in axes
        ]
        return [sum(parts) for parts in itertools.product(*steps)]

    def _shifted(self, rank: int, axis: str, by: int) -> int:
        return rank + by * self._strides[axis]

    def _checked(self, axes: Iterable[str]) -> tuple[str, ...]:
        chosen = tuple(axes)
        unknown = [axis for axis in chosen if axis not in self.config.degrees]
        if unknown:
            raise InvalidArgument(
                f"the mesh has no axis {unknown[0]!r}",
                hint=f"its axes are {', '.join(MESH_ORDER)}",
                axes=chosen,
            )
        return chosen
