"""How the ranks of a group meet before MPI is asked: who is there, and which process of the MPI job each one is.

Every step is a value in the store that all ranks read, so all come to the same verdict, within the deadline: MPI itself
would wait for an absent rank for ever.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from torsh_distributed.comm.meeting.key_wait import wait_for_keys
from torsh_distributed.errors import BackendError, ConfigurationError, OperationTimeout


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank of the group and its process in the MPI job."""

    mpi_rank: int
    mpi_size: int
    library: str
    rank: int | None
    """The rank in the world, which must be that of MPI. None: another world was made of this job since it began."""
    world_size: int | None
    group_id: str
    """Random; that of the first rank names the group."""


class Meeting:
    """One rank's side of the meeting. Keys carry the attempt: a store may still hold those of an earlier one."""

    def __init__(self, store: dist.Store, *, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        attempt = store.add(f"mpi/attempt/{rank}", 1)
        self._store = dist.PrefixStore(f"mpi/{attempt}", store)

    @property
    def remaining_s(self) -> float:
        """What is left of the time to meet."""
        return max(self._deadline - time.monotonic(), 0.001)

    def arrive(self, problem: str) -> None:
        """Say that this rank is here, or what keeps it from MPI; raises on the others if a rank has a problem."""
        problems = self._exchange("here", problem)
        first = next((rank for rank, text in enumerate(problems) if text), None)
        if first is not None and not problem:
            raise BackendError(
                f"rank {first} cannot use MPI: {problems[first]}",
                hint="install the same MPI on every node; look at that rank's error",
                backend="mpi4py",
                failed_ranks=[rank for rank, text in enumerate(problems) if text],
            )

    def sit(self, seat: Seat) -> list[Seat]:
        """Say which process of the MPI job this is, and learn it of all others; `check_seats` tells if they fit."""
        return [Seat(**entry) for entry in self._exchange("seat", asdict(seat))]

    def _exchange(self, kind: str, value: object) -> list[Any]:
        self._store.set(f"{kind}/{self._rank}", json.dumps(value))
        keys = [f"{kind}/{rank}" for rank in range(self._num_ranks)]
        if not wait_for_keys(self._store, keys, self.remaining_s):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise OperationTimeout(
                f"the group did not come together within {self._timeout_s:g} s; "
                f"missing: {', '.join(f'rank {rank}' for rank in missing) or 'nobody any more'}",
                hint="every rank of the group must create it; look at the output of the missing ones",
                operation="create the mpi4py group",
                missing_ranks=missing,
                timeout_s=self._timeout_s,
            )
        return [json.loads(self._store.get(key)) for key in keys]


def check_seats(seats: Sequence[Seat]) -> None:
    """Raise ConfigurationError unless the ranks are different processes of one MPI job, numbered as MPI does."""
    for group_rank, seat in enumerate(seats):
        if seat.world_size is not None and seat.mpi_size != seat.world_size:
            raise ConfigurationError(
                f"the MPI job has {seat.mpi_size} processes, but the world has {seat.world_size} ranks",
                hint=_not_one_job(seat),
                group_rank=group_rank,
                mpi_world_size=seat.mpi_size,
                world_size=seat.world_size,
                library=seat.library,
            )
        if seat.rank is not None and seat.mpi_rank != seat.rank:
            raise ConfigurationError(
                f"rank {seat.rank} is process {seat.mpi_rank} of the MPI job; the two numbers must be the same",
                hint="do not set RANK by hand under mpiexec: unset RANK and WORLD_SIZE, MPI gives them",
                rank=seat.rank,
                mpi_rank=seat.mpi_rank,
            )
    mpi_ranks = [seat.mpi_rank for seat in seats]
    if len(set(mpi_ranks)) != len(mpi_ranks) or len({(seat.mpi_size, seat.library) for seat in seats}) > 1:
        raise ConfigurationError(
            "the ranks of the group are not processes of one MPI job",
            hint=_not_one_job(seats[0]),
            mpi_ranks=mpi_ranks,
            mpi_world_sizes=[seat.mpi_size for seat in seats],
            libraries=sorted({seat.library for seat in seats}),
        )


def _not_one_job(seat: Seat) -> str:
    if seat.mpi_size > 1:
        return "start as many processes as the world has ranks, all with one mpiexec"
    return (
        "the processes were not started together by MPI: use `mpiexec -n N python script.py` of the same MPI library, "
        "or `torsh run --mpi` (MPICH)"
    )
