"""Process sets: operations of some ranks only. Ids count from 0, the global set, in order of registration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist
from typing_extensions import override

from torsh_distributed.comm.groups.manager import group_over
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.horovod.negotiation.request import OpKind, PendingOp, Request
from torsh_distributed.migrate.horovod.negotiation.set_engine import SetEngine
from torsh_distributed.migrate.horovod.world_state import JoinedSet, RegisteredSet, WorldState, is_up, world


class ProcessSet:
    """Ranks that communicate among themselves. Registered by `init(process_sets=…)` or `add_process_set`."""

    process_set_id: int | None = None
    """The id; None while it is not registered."""
    ranks: list[int] | None = None
    """Its ranks, sorted."""
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_size"):
            raise NotImplementedError("a process set is given as ranks: an MPI communicator is not supported here")
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) or isinstance(rank, bool) for rank in ranks):
            raise InvalidArgument("the ranks of a process set are whole numbers", ranks=ranks)
        self.ranks = sorted(ranks)

    def _registered(self) -> RegisteredSet | None:
        if self.process_set_id is None or not is_up():
            return None
        return world().sets.get(self.process_set_id)

    def size(self) -> int | None:
        """Its number of ranks; None if it is not registered."""
        found = self._registered()
        return None if found is None else len(found.ranks)

    def rank(self) -> int | None:
        """This process's index in it; None if it is not registered or this process is not in it."""
        found = self._registered()
        if found is None or world().rank not in found.ranks:
            return None
        return found.ranks.index(world().rank)

    def included(self) -> bool | None:
        """Whether this process is in it; None if its ranks are not known."""
        return None if self.ranks is None or not is_up() else world().rank in self.ranks

    @override
    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _GlobalSet(ProcessSet):
    """All ranks; it exists before `init`, without ranks."""

    def __init__(self) -> None:
        self.process_set_id = 0


global_process_set: ProcessSet = _GlobalSet()
"""All ranks: id 0."""


def engine_of(process_set: ProcessSet) -> SetEngine:
    """The engine of a registered set that this process is in. Raises InvalidArgument otherwise."""
    return registered_set(process_set).engine


def registered_set(process_set: ProcessSet) -> JoinedSet:
    """A registered set that this process is in. Raises InvalidArgument otherwise."""
    state = world()
    found = None if process_set.process_set_id is None else state.sets.get(process_set.process_set_id)
    if found is None:
        raise InvalidArgument(
            "the process set is not registered",
            hint="pass it to hvd.init(process_sets=[…]), or call hvd.add_process_set() on every rank",
            process_set=str(process_set),
        )
    if found.engine is None:
        raise InvalidArgument(
            f"rank {state.rank} is not in the process set", hint="only its ranks call this", ranks=found.ranks
        )
    return cast(JoinedSet, found)


def set_ranks(process_set: ProcessSet) -> list[int]:
    """The ranks of a registered set."""
    engine_of(process_set)
    assert process_set.process_set_id is not None, "it is registered"
    return world().sets[process_set.process_set_id].ranks


def set_size(process_set: ProcessSet) -> int:
    """The number of ranks of a registered set that this process is in."""
    return len(set_ranks(process_set))


def register(process_set: ProcessSet, state: WorldState) -> None:
    """Give a set its id, group and engine; all ranks call this in the same order, members or not."""
    ranks = process_set.ranks
    assert ranks is not None, "checked by the caller"
    members = [state.members[rank] for rank in ranks]
    set_id, state.next_set_id = state.next_set_id, state.next_set_id + 1
    engine = None
    if state.rank in ranks:
        engine = SetEngine(group_over(members), members, state.settings, name=str(set_id))
        engine.timeline = state.timeline if state.rank == ranks[0] else None
    state.sets[set_id] = RegisteredSet(ranks, engine)
    process_set.process_set_id = set_id


def check_ranks(process_set: ProcessSet, state: WorldState) -> None:
    """Raise InvalidArgument for a set that cannot be registered."""
    ranks = process_set.ranks
    if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < state.size for rank in ranks):
        raise InvalidArgument(
            "a process set needs ranks of the world, each once",
            hint=f"ranks go from 0 to {state.size - 1}",
            ranks=ranks,
        )
    for other_id, other in state.sets.items():
        if other.ranks == ranks:
            raise InvalidArgument(
                "a process set with these ranks is registered already",
                hint="use the one that is there" if other_id else "use hvd.global_process_set",
                ranks=ranks,
                process_set_id=other_id,
            )


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set while training; every rank calls this, in or out of it, with the same ranks."""
    state = world()
    _require_dynamic(state)
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    check_ranks(chosen, state)
    _agree(state, "add", chosen.ranks or [])
    register(chosen, state)
    return chosen


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a set; every rank calls this. False for the global one and for one that is not registered."""
    state = world()
    set_id = process_set.process_set_id
    if set_id == 0 or set_id is None or set_id not in state.sets:
        return False
    _require_dynamic(state)
    _agree(state, "remove", state.sets[set_id].ranks)
    removed = state.sets.pop(set_id)
    if removed.engine is not None:
        removed.engine.close()
    process_set.process_set_id = None
    return True


def _require_dynamic(state: WorldState) -> None:
    if not state.allows_dynamic_sets:
        raise InvalidArgument(
            "process sets can be added and removed only if that was asked for at the start",
            hint='call hvd.init(process_sets="dynamic") or set HOROVOD_DYNAMIC_PROCESS_SETS=1',
        )


def _agree(state: WorldState, action: str, ranks: list[int]) -> None:
    """Return when every rank of the world wants the same; raises on all of them if they do not."""
    engine = engine_of(global_process_set)
    number = next(state.set_changes)
    op = PendingOp(Request(f"process_set.{number}", OpKind.PROCESS_SET, op=action, splits=tuple(ranks)), [])
    engine.submit(op)
    engine.wait(op)


def process_sets_by_id() -> dict[int, list[int]]:
    """The registered sets: id to ranks."""
    return {set_id: list(found.ranks) for set_id, found in world().sets.items()}


def world_rank_of(rank: int) -> int:
    """A Horovod rank as a rank of the torch world."""
    state = world()
    if not 0 <= rank < state.size:
        raise InvalidArgument(f"rank {rank} is outside 0..{state.size - 1}", rank=rank)
    return state.members[rank]


def torch_group_is_up() -> bool:
    """Whether torch has a process group, ours or the script's own."""
    return dist.is_available() and dist.is_initialized()
