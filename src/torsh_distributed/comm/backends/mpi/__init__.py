"""The mpi4py backend: a c10d process group over real MPI.

Read `library` (MPI in this process), `group` (how a group is made), `wire`, `waiting`, `transfers`,
`control`.
"""

from torsh_distributed.comm.backends.mpi.group import create_mpi_group, create_mpi_wire
from torsh_distributed.comm.backends.mpi.wire import MpiWire

__all__ = ["MpiWire", "create_mpi_group", "create_mpi_wire"]
