"""`torsh run --mpi`: workers that are one MPI job, started and supervised by the launcher itself.

Why not mpiexec: it would stand between the launcher and the workers, and the launcher could no longer report who
failed first and why, restart, forward signals or keep logs. MPICH needs only a PMI server, which is small.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torsh_distributed.comm.backends.mpi.library import INSTALL, library
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.launch.entry import check_entry, command_line
from torsh_distributed.launch.mpi import pmi_worker
from torsh_distributed.launch.mpi.pmi_server import PmiServer
from torsh_distributed.launch.spec import Entry, EntryKind, JobSpec

_OTHER_LAUNCHER = "start the job with `mpiexec -n N python script.py`; init() finds its place there too"


@contextmanager
def mpi_job(spec: JobSpec) -> Iterator[JobSpec]:
    """The job with workers that MPI knows as one world; run it inside the context.

    Raises FeatureNotAvailable for several nodes, and if MPI is missing or its library does not use MPICH's PMI.
    """
    if spec.nnodes > 1:
        raise FeatureNotAvailable(
            "--mpi starts the workers of one node", hint=f"across nodes {_OTHER_LAUNCHER}", nnodes=spec.nnodes
        )
    vendor, _ = library().mpi.get_vendor()
    if vendor == "Open MPI":
        raise FeatureNotAvailable(
            "--mpi starts jobs of MPICH and its relatives, and the MPI library here is Open MPI",
            hint=f"{_OTHER_LAUNCHER}; or {INSTALL} for MPICH",
            library=vendor,
        )
    check_entry(spec.entry)
    with PmiServer(spec.nproc_per_node) as server:
        shim = str(Path(pmi_worker.__file__))
        yield dataclasses.replace(
            spec,
            entry=Entry(
                kind=EntryKind.COMMAND,
                target=sys.executable,
                args=("-I", "-S", shim, *command_line(spec.entry)),
            ),
            env={**spec.env, pmi_worker.ADDRESS_VARIABLE: server.address},
        )
