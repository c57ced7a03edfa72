"""What all strategies over a mesh share: who gets which part of a batch."""

from __future__ import annotations

import torch.distributed as dist
from typing_extensions import override

from torsh_distributed.parallel.mesh.layout import GRADIENT_AXES
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.strategy import Strategy


class MeshStrategy(Strategy):
    """A strategy over the axes of a mesh, whose ranks communicate in forward."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        axes = [axis for axis in mesh.layout.used_axes if axis != "tp"]
        self._random_part = mesh.layout.group_ranks(mesh.rank, *axes).index(mesh.rank) if axes else None

    @property
    @override
    def data_rank(self) -> int:
        return self._mesh.data_rank

    @property
    @override
    def data_degree(self) -> int:
        return self._mesh.data_degree

    @property
    @override
    def samples_group(self) -> dist.ProcessGroup:
        return self._mesh.group(*GRADIENT_AXES)

    @property
    @override
    def random_part(self) -> int | None:
        return self._random_part

    @property
    @override
    def forward_is_collective(self) -> bool:
        return True
