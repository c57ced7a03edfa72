"""`init_process_group("mpi4py")` under mpiexec: rank, world size and the store come from MPI.

Called by the `env://` handler that `backends.registry` puts in front of torch's.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from torsh_distributed.comm.backends.mpi.library import MpiLibrary, library
from torsh_distributed.comm.meeting.rendezvous import open_store
from torsh_distributed.comm.store.store import Store
from torsh_distributed.errors import CommunicationError, ConfigurationError, OperationTimeout, TorshError

Found = tuple[dist.Store, int, int]

_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_LOCAL_SIZE_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
_LOOPBACK = "127.0.0.1"
_PORT_BYTES = 4
_NO_PORT = 0


def meet_through_mpi(timeout: timedelta = default_pg_timeout) -> Found:
    """A store that rank 0 hosts, this process's rank and the size of the MPI job; every process of the job calls it.

    MASTER_ADDR and MASTER_PORT are honoured; without them the store is on loopback, on a free port.
    """
    timeout_s = timeout.total_seconds()
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
    port = _broadcast_port(ours, _port_of(store), timeout_s)
    if port == _NO_PORT:
        raise CommunicationError(
            "rank 0 could not open the store of the job", hint="look at that rank's error", operation="rendezvous"
        )
    return store or open_store(host, port, is_host=False, timeout_s=timeout_s), rank, size


def _port_of(store: dist.Store | None) -> int:
    """The port of a store hosted here: torch's without a secret of the job, ours with one."""
    if isinstance(store, dist.TCPStore):
        return store.port
    return int(store.url.rpartition(":")[2]) if isinstance(store, Store) else _NO_PORT


def _check_launcher(ours: MpiLibrary, size: int) -> None:
    """Raise if launcher and library are of different MPIs: then every process is a job of its own."""
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


def _broadcast_port(ours: MpiLibrary, port: int, timeout_s: float) -> int:
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
