"""Creates an mpi4py group: the ranks meet in the store, start MPI, check their numbers, get a communicator."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch.distributed as dist

from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.mpi.library import MpiLibrary, library, missing_mpi
from torsh_distributed.comm.backends.mpi.meeting import MpiMeeting, MpiProcess
from torsh_distributed.comm.backends.mpi.wire import MpiWire
from torsh_distributed.errors import OperationTimeout

if TYPE_CHECKING:
    from mpi4py import MPI


def create_mpi_group(options: Any, backend_options: object) -> TorshProcessGroup:
    """c10d's hook for the backend: every rank of the group calls it, through init_process_group or new_group.

    Any: the class of `options` is private to torch. The backend has no options of its own.
    """
    if dist.is_initialized():
        members = list(options.global_ranks_in_group) or list(range(options.group_size))
        world_size = dist.get_world_size()
    else:
        members, world_size = list(range(options.group_size)), options.group_size
    wire = create_mpi_wire(
        options.store,
        rank=options.group_rank,
        members=members,
        world_size=world_size,
        name=options.group_id,
        timeout=options.timeout,
    )
    return TorshProcessGroup(options.store, wire, options.timeout)


def create_mpi_wire(
    store: dist.Store, *, rank: int, members: Sequence[int], world_size: int, name: str, timeout: timedelta
) -> MpiWire:
    """Meet the other ranks in `store` and get a communicator with them; every rank of the group calls it.

    `members` are the group's ranks in the world of `world_size`. In the first group of a process they must be those of
    the MPI job; a world rebuilt from the survivors has its own numbers, and each process keeps its MPI rank.
    """
    timeout_s = timeout.total_seconds()
    meeting = MpiMeeting(store, rank=rank, num_ranks=len(members), timeout_s=timeout_s)
    meeting.arrive(missing_mpi())
    ours = library()
    meeting.line_up()
    ours.start(meeting.remaining_s)
    is_first = not ours.has_groups
    processes = meeting.exchange(
        MpiProcess(
            mpi_rank=ours.world.Get_rank(),
            mpi_size=ours.world.Get_size(),
            library=ours.version,
            rank=members[rank] if is_first else None,
            world_size=world_size if is_first else None,
            group_id=uuid4().hex[:8],
        )
    )
    ours.forget_segment_names()
    meeting.check(processes)
    comm = _communicator(ours, [process.mpi_rank for process in processes], name, meeting.remaining_s)
    return MpiWire(ours, comm, group_id=processes[0].group_id, timeout_s=timeout_s)


def _communicator(ours: MpiLibrary, mpi_ranks: list[int], name: str, timeout_s: float) -> MPI.Intracomm:
    """A communicator of these processes, in this order. Only they call it; the tag tells concurrent groups apart."""
    found: list[MPI.Intracomm] = []
    tag = zlib.crc32(name.encode()) % ours.max_tag

    def create() -> None:
        everybody = ours.world.Get_group()
        chosen = everybody.Incl(mpi_ranks)
        comm = ours.world.Create_group(chosen, tag)
        comm.Set_errhandler(ours.mpi.ERRORS_RETURN)
        chosen.Free()
        everybody.Free()
        found.append(comm)

    if not ours.call_within(create, timeout_s):
        ours.abandon(create)
        raise OperationTimeout(
            f"MPI did not create a communicator within {timeout_s:.1f} s, though every rank was there",
            hint="a rank ended meanwhile, or MPI cannot reach it: look at the output of mpiexec",
            operation="create the mpi4py group",
            mpi_ranks=mpi_ranks,
            timeout_s=timeout_s,
        )
    return found[0]
