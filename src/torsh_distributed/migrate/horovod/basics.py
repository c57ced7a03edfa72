"""`init` and `shutdown`, the place of this process, what the library was built with, and the timeline."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torsh_distributed import known_variables
from torsh_distributed.comm.agreement import require_same
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.collectives.work import group_timeout_s
from torsh_distributed.comm.groups.divided_world import divide_world
from torsh_distributed.comm.groups.manager import group_over
from torsh_distributed.comm.groups.process_group import before_destroy
from torsh_distributed.comm.meeting.node_identity import node_identity
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.worker.environment import read_environment
from torsh_distributed.launch.worker.init import init as join_job
from torsh_distributed.migrate.horovod.horovod_errors import not_initialized
from torsh_distributed.migrate.horovod.negotiation.request import read_settings
from torsh_distributed.migrate.horovod.negotiation.set_engine import SetEngine
from torsh_distributed.migrate.horovod.negotiation.timeline_file import TimelineFile
from torsh_distributed.migrate.horovod.process_sets import (
    ProcessSet,
    check_ranks,
    global_process_set,
    register,
    torch_group_is_up,
)
from torsh_distributed.migrate.horovod.world_state import RegisteredSet, WorldState, is_up, set_world, world

_log = logging.getLogger(__name__)
_forget_hook: Callable[[], None] | None = None


def init(comm: Sequence[int] | Any | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job and start the engines; every rank calls this. A second call does nothing.

    `comm`: the ranks of the job that take part, renumbered from 0; None is all. `process_sets`: sets to register, or
    "dynamic" to allow adding them later. Works under `torsh run` and every launcher that `torsh_distributed.init`
    knows, and on a torch process group that is up already. If it makes the group itself, `torch.distributed` looks as
    under Horovod to the script and to other libraries: not initialised.
    """
    if is_up():
        return
    if hasattr(comm, "Get_size"):
        raise NotImplementedError("hvd.init(comm) takes a list of ranks: an MPI communicator is not supported here")
    sets, is_dynamic = _wanted_sets(process_sets)
    if not torch_group_is_up():
        join_job()
        divide_world()
    members = sorted(int(rank) for rank in comm) if comm else list(range(dist.get_world_size()))
    _check_members(members)
    state = _start(members, is_dynamic=is_dynamic)
    set_world(state)
    global_process_set.ranks = list(range(state.size))
    try:
        for process_set in sets:
            check_ranks(process_set, state)
            register(process_set, state)
    except BaseException:
        shutdown()
        raise
    _shut_down_at_exit()


def _wanted_sets(process_sets: Sequence[ProcessSet] | str | None) -> tuple[list[ProcessSet], bool]:
    is_dynamic = known_variables.is_on("HOROVOD_DYNAMIC_PROCESS_SETS")
    if process_sets is None:
        return [], is_dynamic
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise InvalidArgument('process_sets is a list of ProcessSet, or "dynamic"', got=process_sets)
        return [], True
    sets = [one if isinstance(one, ProcessSet) else ProcessSet(one) for one in process_sets]
    seen = [one.ranks for one in sets]
    for index, ranks in enumerate(seen):
        if ranks in seen[:index]:
            raise InvalidArgument("two process sets have the same ranks", ranks=ranks)
    return sets, is_dynamic


def _check_members(members: list[int]) -> None:
    size, me = dist.get_world_size(), dist.get_rank()
    if len(set(members)) != len(members) or not all(0 <= rank < size for rank in members) or me not in members:
        raise InvalidArgument(
            "the ranks given to hvd.init must be ranks of the job, each once, and include the caller",
            hint="ranks that take no part do not call hvd.init",
            comm=members,
            rank=me,
            world_size=size,
        )


def _start(members: list[int], *, is_dynamic: bool) -> WorldState:
    group = group_over(members)
    place = read_environment()
    nodes = all_gather_object(_node_name(place.node_rank), group=group)
    order = list(dict.fromkeys(nodes))
    me = group.rank()
    node_ranks = [rank for rank, node in enumerate(nodes) if node == nodes[me]]
    local_rank = node_ranks.index(me)
    sizes = [nodes.count(node) for node in order]
    across = [node for node in order if nodes.count(node) > local_rank]
    settings = read_settings(os.environ, timeout_s=group_timeout_s(group))
    require_same(
        {"dynamic process sets": is_dynamic, "fusion threshold": settings.fusion_threshold_bytes},
        group=group,
        what="the ranks' Horovod settings",
        hint="set HOROVOD_* variables alike on all ranks",
    )
    timeline_path = os.environ.get("HOROVOD_TIMELINE", "")
    state = WorldState(
        rank=me,
        size=len(members),
        local_rank=local_rank,
        local_size=len(node_ranks),
        cross_rank=across.index(nodes[me]),
        cross_size=len(across),
        is_homogeneous=len(set(sizes)) == 1,
        members=members,
        settings=settings,
        allows_dynamic_sets=is_dynamic,
        allows_timeline=bool(timeline_path),
    )
    engine = SetEngine(group, members, settings)
    state.sets[0] = RegisteredSet(list(range(len(members))), engine)
    if timeline_path and timeline_path.upper() != "DYNAMIC" and me == 0:
        marks = known_variables.is_on("HOROVOD_TIMELINE_MARK_CYCLES")
        state.timeline = engine.timeline = TimelineFile(timeline_path, mark_cycles=marks)
    return state


def _node_name(node_rank: int | None) -> str:
    return node_identity() if node_rank is None else f"node-{node_rank}"


def _shut_down_at_exit() -> None:
    global _forget_hook
    atexit.register(shutdown)
    _forget_hook = before_destroy(shutdown)


def shutdown() -> None:
    """End all operations on all ranks and forget process sets, handles and names; `init` may follow.

    The torch process group stays up until the process ends. Operations in flight fail with HorovodInternalError.
    """
    global _forget_hook
    atexit.unregister(shutdown)
    if _forget_hook is not None:
        _forget_hook()
        _forget_hook = None
    if not is_up():
        return
    state = world()
    set_world(None)
    for _, found in sorted(state.sets.items(), reverse=True):
        if found.engine is not None:
            found.engine.close()
    if state.timeline is not None:
        state.timeline.close()
    global_process_set.ranks = None


def is_initialized() -> bool:
    """Whether `init` was called and `shutdown` was not."""
    return is_up()


# --- the place of this process --------------------------------------------------------------------------------


def size() -> int:
    """The number of ranks."""
    return world().size


def rank() -> int:
    """The index of this process among all."""
    return world().rank


def local_size() -> int:
    """The number of ranks on this node."""
    return world().local_size


def local_rank() -> int:
    """The index of this process on its node: the GPU to use."""
    return world().local_rank


def cross_size() -> int:
    """The number of nodes that have a rank with this local rank."""
    return world().cross_size


def cross_rank() -> int:
    """The index of this node among those."""
    return world().cross_rank


def is_homogeneous() -> bool:
    """Whether every node has the same number of ranks."""
    return world().is_homogeneous


# --- what is there --------------------------------------------------------------------------------------------


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads: False, no MPI is underneath. Raises before `init`, as ever."""
    world()
    return False


def mpi_enabled() -> bool:
    """Whether MPI controls the operations: never."""
    return False


def mpi_built() -> bool:
    """Whether MPI controls could be used: never."""
    return False


def gloo_enabled() -> bool:
    """Whether operations are negotiated without MPI: always."""
    return True


def gloo_built() -> bool:
    """Whether operations can be negotiated without MPI: always."""
    return True


def nccl_built() -> int:
    """NCCL's version as a number such as 22705, if GPUs can use it; otherwise 0."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]  # untyped in torch
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """Whether IBM's DDL is underneath: no."""
    return False


def ccl_built() -> bool:
    """Whether Intel's CCL is underneath: no."""
    return False


def cuda_built() -> bool:
    """Whether this torch works on CUDA devices."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this torch works on ROCm devices."""
    return torch.version.hip is not None


# --- the timeline ---------------------------------------------------------------------------------------------


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin a timeline file on rank 0; a running one is closed first. Every rank may call this."""
    state = _timeline_state()
    stop_timeline()
    if state.rank == 0:
        state.timeline = TimelineFile(file_path, mark_cycles=mark_cycles)
    _hand_out(state)


def stop_timeline() -> None:
    """Close the timeline file, if one is open."""
    state = _timeline_state()
    timeline, state.timeline = state.timeline, None
    _hand_out(state)
    if timeline is not None:
        timeline.close()


def _hand_out(state: WorldState) -> None:
    for found in state.sets.values():
        if found.engine is not None:
            found.engine.timeline = state.timeline


def _timeline_state() -> WorldState:
    if not is_up():
        raise not_initialized()
    state = world()
    if not state.allows_timeline:
        raise InvalidArgument(
            "timelines were not asked for at the start",
            hint="set HOROVOD_TIMELINE=DYNAMIC, or --timeline-filename DYNAMIC, before hvd.init()",
        )
    return state
