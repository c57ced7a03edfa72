"""The mpi4py backend: a c10d process group over real MPI."""

from torsh_distributed.comm.backends.mpi.group import create_mpi_group, create_mpi_wire
from torsh_distributed.comm.backends.mpi.wire import MpiWire

__all__ = ["MpiWire", "create_mpi_group", "create_mpi_wire"]
