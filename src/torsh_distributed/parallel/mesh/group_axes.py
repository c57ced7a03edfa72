"""Which axis of the mesh a process group belongs to, by the name that events have it by."""

from __future__ import annotations

import torch.distributed as dist

from torsh_distributed.parallel.mesh.layout import MESH_ORDER, MeshLayout
from torsh_distributed.parallel.torch_internals import _resolve_process_group


class GroupAxes:
    """Looks a group up once; any thread may ask."""

    def __init__(self, layout: MeshLayout) -> None:
        self._layout = layout
        self._axes: dict[str, str] = {}

    def __call__(self, group: str) -> str | None:
        """The axes along which its ranks differ, such as `tp` or `dp×shard`; None for one rank, or an unknown group."""
        if group not in self._axes:
            self._axes[group] = self._look_up(group)
        return self._axes[group] or None

    def _look_up(self, group: str) -> str:
        try:
            found = _resolve_process_group(group)  # type: ignore[arg-type]  # torch's name for a str
            members = dist.get_process_group_ranks(found)
        except (LookupError, RuntimeError, ValueError):
            return ""  # it is gone, or was never torch's
        if any(rank >= self._layout.world_size for rank in members):
            return ""  # the world has changed since this mesh was made
        places = [self._layout.coordinates(rank) for rank in members]
        return "×".join(axis for axis in MESH_ORDER if len({place[axis] for place in places}) > 1)
