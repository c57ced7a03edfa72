"""Creates an mpi4py group: the ranks meet in the store, start MPI, check their numbers, get a communicator.

How the ranks of a group meet before they use MPI: who is there, and which process of the MPI job each one is.
All ranks read the same records, so all reach the same conclusion within the deadline. MPI itself would wait for an
absent rank forever.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch.distributed as dist

from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.mpi.library import MpiLibrary, library, missing_mpi
from torsh_distributed.comm.backends.mpi.wire import MpiWire
from torsh_distributed.comm.meeting.store_meeting import StoreMeeting, attempt_store
from torsh_distributed.errors import BackendError, ConfigurationError, OperationTimeout

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True, kw_only=True)
class MpiProcess:
    """A rank of the group and its process in the MPI job."""

    mpi_rank: int
    mpi_size: int
    library: str
    rank: int | None
    """The rank in the world, which must be MPI's. None: the world was rebuilt since the job began."""
    world_size: int | None
    group_id: str
    """Random; that of the first rank names the group."""


class MpiMeeting:
    """One rank's side of the meeting."""

    def __init__(self, store: dist.Store, *, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._meeting = StoreMeeting(
            attempt_store(store, "mpi", rank),
            rank=rank,
            num_ranks=num_ranks,
            timeout_s=timeout_s,
            operation="create the mpi4py group",
        )

    @property
    def remaining_s(self) -> float:
        """The time left to meet."""
        return self._meeting.remaining_s

    def arrive(self, problem: str) -> None:
        """Say that this rank is here, or why it cannot use MPI; raises on the others if a rank has a problem."""
        problems = self._meeting.exchange("here", problem)
        first = next((rank for rank, text in enumerate(problems) if text), None)
        if first is None:
            return
        self._meeting.leave()
        if not problem:
            raise BackendError(
                f"rank {first} cannot use MPI: {problems[first]}",
                hint="install the same MPI on every node; look at that rank's error",
                backend="mpi4py",
                failed_ranks=[rank for rank, text in enumerate(problems) if text],
            )

    def line_up(self) -> None:
        """Let rank 0 start MPI last: it may serve the store on a thread, and mpi4py holds Python's lock meanwhile.

        The others only write here, which takes no answer, and then wait for nobody but MPI.
        """
        if self._rank:
            self._meeting.publish("starting", self._rank, True)
        else:
            for other in range(1, self._num_ranks):
                self._meeting.read("starting", other)

    def exchange(self, process: MpiProcess) -> list[MpiProcess]:
        """Every rank's process in the MPI job; `check` says whether they fit together."""
        return [MpiProcess(**entry) for entry in self._meeting.exchange("process", asdict(process))]

    def check(self, processes: Sequence[MpiProcess]) -> None:
        """Raise ConfigurationError on every rank if the processes do not fit together."""
        try:
            check_processes(processes)
        except ConfigurationError:
            self._meeting.leave()
            raise


def check_processes(processes: Sequence[MpiProcess]) -> None:
    """Raise ConfigurationError unless the ranks are different processes of one MPI job, numbered as MPI does."""
    for group_rank, process in enumerate(processes):
        if process.world_size is not None and process.mpi_size != process.world_size:
            raise ConfigurationError(
                f"the MPI job has {process.mpi_size} processes, but the world has {process.world_size} ranks",
                hint=_not_one_job(process),
                group_rank=group_rank,
                mpi_world_size=process.mpi_size,
                world_size=process.world_size,
                library=process.library,
            )
        if process.rank is not None and process.mpi_rank != process.rank:
            raise ConfigurationError(
                f"rank {process.rank} is process {process.mpi_rank} of the MPI job; the two numbers must be the same",
                hint="do not set RANK by hand under mpiexec: unset RANK and WORLD_SIZE, MPI gives them",
                rank=process.rank,
                mpi_rank=process.mpi_rank,
            )
    mpi_ranks = [process.mpi_rank for process in processes]
    if len(set(mpi_ranks)) != len(mpi_ranks) or len({(process.mpi_size, process.library) for process in processes}) > 1:
        raise ConfigurationError(
            "the ranks of the group are not processes of one MPI job",
            hint=_not_one_job(processes[0]),
            mpi_ranks=mpi_ranks,
            mpi_world_sizes=[process.mpi_size for process in processes],
            libraries=sorted({process.library for process in processes}),
        )


def _not_one_job(process: MpiProcess) -> str:
    if process.mpi_size > 1:
        return "start as many processes as the world has ranks, all with one mpiexec"
    return (
        "the processes were not started together by MPI: use `mpiexec -n N python script.py` of the same MPI library, "
        "or `torsh run --mpi` (MPICH)"
    )


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
