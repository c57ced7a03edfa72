"""Groups by name, and their members. The groups of a layout are those of a plan's mesh.

Every rank creates every group, in the same order, member or not: c10d requires it. A non-member
has a `CommunicationGroup` whose `is_member` is False.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist

from torsh_distributed.comm.backends.gloo import new_connections, patient_threads
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.groups.abort import forget_group, remember_connections
from torsh_distributed.errors import InvalidArgument, ProcessGroupNotFound, RankOutOfBounds


@dataclass(frozen=True)
class CommunicationGroup:
    """An ordered set of ranks of the world, and the process group over them on its members."""

    name: str
    ranks: tuple[int, ...]
    handle: dist.ProcessGroup | None
    """The `group` argument of collectives; None on a rank that is not a member."""

    @property
    def is_member(self) -> bool:
        """Whether this process belongs to it."""
        return self.handle is not None

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return len(self.ranks)

    def to_group_rank(self, rank: int) -> int:
        """The index within the group of a rank of the world."""
        if rank not in self.ranks:
            raise RankOutOfBounds(f"rank {rank} is not in group {self.name!r}", rank=rank, group=self.ranks)
        return self.ranks.index(rank)

    def to_world_rank(self, group_rank: int) -> int:
        """The rank of the world at an index within the group."""
        if not 0 <= group_rank < self.size:
            raise RankOutOfBounds(
                f"group {self.name!r} has ranks 0..{self.size - 1}", rank=group_rank, group=self.ranks
            )
        return self.ranks[group_rank]


def group_over(members: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """A group over `members`, ranks of the world; all of them call this, and no other rank.

    `options` are c10d's own: `backend`, `timeout`.
    """
    group = _new_group(members, use_local_synchronization=True, **options)
    assert group is not None, "the caller is a member"
    return group


def twin_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second group over the same ranks, for operations that another thread starts; all its ranks call this.

    Why: operations of one group start in the same order on every rank, and two threads have no order.
    """
    return group_over(dist.get_process_group_ranks(group))


def _new_group(members: Sequence[int], **options: Any) -> dist.ProcessGroup | None:
    """c10d's group over `members`, known to `abort`; None for a rank outside. Any: c10d's own arguments."""
    backend = options.get("backend") or str(dist.get_backend_config())
    with patient_threads() if "gloo" in backend else nullcontext(), new_connections() as connections:
        group = dist.new_group(list(members), **options)
    if dist.get_rank() not in members:
        return None
    remember_connections(group, connections)
    return cast(dist.ProcessGroup, group)


class GroupManager:
    """Creates groups, finds them by name, destroys them. Every rank makes the same calls in the same order."""

    def __init__(self) -> None:
        self._groups: dict[str, CommunicationGroup] = {}

    def create_group(self, name: str, ranks: Iterable[int], *, backend: str | None = None) -> CommunicationGroup:
        """A new group over `ranks`, in that order; every rank of the world calls this, members or not."""
        members = tuple(ranks)
        self._check(name, members)
        group = CommunicationGroup(name, members, _new_group(members, backend=backend, group_desc=name))
        self._groups[name] = group
        return group

    def group(self, name: str) -> CommunicationGroup:
        """The group of that name, or ProcessGroupNotFound with the known names."""
        if name not in self._groups:
            raise ProcessGroupNotFound(
                f"there is no group {name!r}", group_id=name, available_groups=sorted(self._groups)
            )
        return self._groups[name]

    def list_groups(self) -> list[CommunicationGroup]:
        """All groups, in order of creation."""
        return list(self._groups.values())

    def remove_group(self, name: str) -> None:
        """Destroy a group and forget it; every rank calls this."""
        group = self.group(name)
        if group.handle is not None:
            forget_group(group.handle.group_name)
            dist.destroy_process_group(group.handle)
        del self._groups[name]

    def close(self) -> None:
        """Destroy all groups."""
        for name in list(self._groups):
            self.remove_group(name)

    def _check(self, name: str, members: tuple[int, ...]) -> None:
        if name in self._groups:
            raise InvalidArgument(f"a group {name!r} exists already", hint="choose another name, or remove it first")
        if not members or len(set(members)) != len(members):
            raise InvalidArgument("a group needs at least one rank, each once", group_id=name, ranks=list(members))
        outside = [rank for rank in members if not 0 <= rank < process_group.world_size()]
        if outside:
            raise RankOutOfBounds(
                f"group {name!r} names ranks outside the world of {process_group.world_size()}", ranks=outside
            )
