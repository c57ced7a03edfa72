"""`init_process_group("mpi4py")` under mpiexec: rank, world size and the store come from MPI.

torch's `env://` needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which mpiexec does not set, and offers no hook for
a backend to say where they come from. So its handler is wrapped: where RANK is missing and an MPI launcher started the
process, MPI is asked; in every other case torch's own handler answers. This can go once torch lets a backend name its
own rendezvous.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from urllib.parse import urlparse

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers as torch_handlers

from torsh_distributed.comm.backends.mpi.library import Library, library
from torsh_distributed.comm.meeting.rendezvous import open_store
from torsh_distributed.errors import CommunicationError, ConfigurationError, OperationTimeout, TorshError

Found = tuple[dist.Store, int, int]
Handler = Callable[..., Iterator[Found]]

_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_LOCAL_SIZE_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
_LOOPBACK = "127.0.0.1"
_PORT_BYTES = 4
_NO_PORT = 0


def register_mpi_rendezvous() -> None:
    """Let `env://` find the place of a process that mpiexec started. Called once, by importing torsh_distributed."""
    if not getattr(torch_handlers["env"], "knows_mpi", False):
        torch_handlers["env"] = _wrap(torch_handlers["env"])


def _wrap(torch_handler: Handler) -> Handler:
    def find(url: str, timeout: timedelta = default_pg_timeout, **options: object) -> Iterator[Found]:
        if _is_left_to_mpi(url):
            yield meet_through_mpi(timeout.total_seconds())
        else:
            yield from torch_handler(url, timeout=timeout, **options)

    find.knows_mpi = True  # type: ignore[attr-defined]  # so that registering twice wraps once
    return find


def _is_left_to_mpi(url: str) -> bool:
    """Whether nobody says the rank, and an MPI launcher started this process."""
    is_given = "RANK" in os.environ or "rank=" in urlparse(url).query
    return not is_given and any(name in os.environ for name in _RANK_VARIABLES)


def meet_through_mpi(timeout_s: float) -> Found:
    """A store that rank 0 hosts, this process's rank and the size of the MPI job; every process of the job calls it.

    MASTER_ADDR and MASTER_PORT are honoured; without them the store is on loopback, on a free port.
    """
    ours = library()
    ours.start(timeout_s)
    rank, size = ours.world.Get_rank(), ours.world.Get_size()
    _check_launcher(ours, size)
    host = _master_addr(size)
    store: dist.Store | None = None
    try:
        if rank == 0:
            store = open_store(host, int(os.environ.get("MASTER_PORT", _NO_PORT)), is_host=True, timeout_s=timeout_s)
    except TorshError:
        _broadcast_port(ours, _NO_PORT, timeout_s)
        raise
    port = _broadcast_port(ours, store.port if isinstance(store, dist.TCPStore) else _NO_PORT, timeout_s)
    if port == _NO_PORT:
        raise CommunicationError(
            "rank 0 could not open the store of the job", hint="look at that rank's error", operation="rendezvous"
        )
    return store or open_store(host, port, is_host=False, timeout_s=timeout_s), rank, size


def _check_launcher(ours: Library, size: int) -> None:
    """The launcher of one MPI and the library of another make of every process a job of its own."""
    started = next((int(os.environ[name]) for name in _SIZE_VARIABLES if name in os.environ), size)
    if started != size:
        raise ConfigurationError(
            f"the launcher started {started} processes, but the MPI library sees a job of {size}",
            hint="use the mpiexec that belongs to the library, or set MPI4PY_LIBMPI to the library of this mpiexec",
            library=ours.version,
            launched=started,
            mpi_world_size=size,
        )


def _master_addr(size: int) -> str:
    given = os.environ.get("MASTER_ADDR")
    if given is not None:
        return given
    local_sizes = [os.environ[name] for name in _LOCAL_SIZE_VARIABLES if name in os.environ]
    if local_sizes != [str(size)]:
        raise ConfigurationError(
            "MASTER_ADDR is not set, and the MPI job spans several nodes",
            hint="export MASTER_ADDR with the address of the node of rank 0",
            world_size=size,
            local_world_size=local_sizes[0] if local_sizes else None,
        )
    return _LOOPBACK


def _broadcast_port(ours: Library, port: int, timeout_s: float) -> int:
    """Rank 0's port on every rank."""
    message = bytearray(port.to_bytes(_PORT_BYTES))
    if not ours.wait_asleep(ours.world.Ibcast((message, ours.mpi.BYTE), 0), timeout_s):
        raise OperationTimeout(
            f"the processes of the MPI job did not meet within {timeout_s:g} s",
            hint="every process must call init_process_group()",
            operation="rendezvous",
            timeout_s=timeout_s,
        )
    return int.from_bytes(message)
