"""MPI in this process: loaded on first use, initialised for the first group, finalised at exit.

A process has one MPI and cannot start it twice, so one object here keeps its state.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from torsh_distributed.comm.backends.mpi.datatypes import MpiDatatypes
from torsh_distributed.errors import BackendError, ConfigurationError, FeatureNotAvailable, OperationTimeout

if TYPE_CHECKING:
    from mpi4py import MPI

INSTALL = 'pip install "torsh-distributed[mpi]"'
_FINALIZE_TIMEOUT_S = 5.0
_PAUSE_S = 0.005
_SEGMENT_PREFIX = "/dev/shm/mpich_shm_"  # noqa: S108 - MPICH's name
_DELETED = " (deleted)"
_MIN_TAG_UB = 32767
"""What the standard promises."""


class Closable(Protocol):
    """Something to close before MPI is finalised."""

    def close(self) -> None:
        """Release MPI's resources."""


class MpiLibrary:
    """MPI in this process, loaded but not yet initialised; `library()` makes the only one."""

    def __init__(self, mpi: ModuleType) -> None:
        self.mpi = mpi
        self.has_groups = False
        """Whether this process has created a group before."""
        self._wires: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._abandoned: list[object] = []
        self._exit_timeout_s = 0.0

    @functools.cached_property
    def version(self) -> str:
        """The first line of the MPI library's version text."""
        return str(self.mpi.Get_library_version()).splitlines()[0].strip(" \0")

    @functools.cached_property
    def max_tag(self) -> int:
        """The largest tag of a message."""
        found = self.world.Get_attr(self.mpi.TAG_UB)
        return int(found) if found is not None else _MIN_TAG_UB

    @property
    def world(self) -> MPI.Intracomm:
        """All processes of the MPI job."""
        world: MPI.Intracomm = self.mpi.COMM_WORLD
        return world

    @functools.cached_property
    def datatypes(self) -> MpiDatatypes:
        """MPI's description of tensors; MPI must have been started."""
        return MpiDatatypes(self.mpi)

    @property
    def is_usable(self) -> bool:
        """Whether MPI can be called now: initialised, not yet finalised."""
        return bool(self.mpi.Is_initialized() and not self.mpi.Is_finalized())

    def start(self, timeout_s: float) -> None:
        """Initialise MPI unless that is done. Every process of the MPI job must, within `timeout_s`."""
        if self.mpi.Is_finalized():
            raise BackendError(
                "MPI was finalised in this process, and it cannot be started twice",
                hint="call MPI.Finalize() after the last group is destroyed, or leave it to the end of the process",
                backend="mpi4py",
            )
        if not self.mpi.Is_initialized():
            if not self.call_within(lambda: self.mpi.Init_thread(self.mpi.THREAD_MULTIPLE), timeout_s):
                raise OperationTimeout(
                    f"MPI did not start within {timeout_s:.1f} s",
                    hint="every process that mpiexec started must come here; look at the output of the others",
                    operation="MPI_Init_thread",
                    timeout_s=timeout_s,
                )
            atexit.register(self._end, os.getpid())
        level = self.mpi.Query_thread()
        if level < self.mpi.THREAD_MULTIPLE:
            raise ConfigurationError(
                "MPI was initialised without support for several threads, which groups need",
                hint='set mpi4py.rc.thread_level = "multiple" before importing mpi4py.MPI, or leave MPI to the group',
                needed="MPI_THREAD_MULTIPLE",
                thread_level=level,
            )

    def forget_segment_names(self) -> None:
        """Remove the names of the shared memory that this process has mapped for MPI; the memory itself stays.

        MPICH keeps them in /dev/shm until `MPI_Finalize`, so a killed job would leave them there forever. Call it when
        all ranks are known to have left `MPI_Init`: from then on the names are not needed.
        """
        for line in Path("/proc/self/maps").read_text().splitlines():
            _, _, path = line.partition(_SEGMENT_PREFIX)
            if path and not path.endswith(_DELETED):
                Path(_SEGMENT_PREFIX + path).unlink(missing_ok=True)

    def register(self, wire: Closable, timeout_s: float) -> None:
        """Close `wire` before MPI ends; at exit the other ranks are waited for at most `timeout_s`."""
        self.has_groups = True
        self._wires.add(wire)
        self._exit_timeout_s = max(self._exit_timeout_s, timeout_s)

    def abandon(self, *things: object) -> None:
        """Keep requests and their memory forever: MPI may still write there, and that cannot be cancelled."""
        self._abandoned.append(things)

    def wait_asleep(self, request: MPI.Request, timeout_s: float) -> bool:
        """Wait where a few milliseconds do not matter; whether the request was done in time."""
        deadline, never = time.monotonic() + timeout_s, threading.Event()
        while not request.Test():
            if time.monotonic() >= deadline:
                self.abandon(request)
                return False
            never.wait(_PAUSE_S)
        return True

    def call_within(self, function: Callable[[], object], timeout_s: float) -> bool:
        """Run a call of MPI that blocks and knows no deadline; whether it returned in time. Its error is raised.

        When the time is over the thread is left running: a call of MPI cannot be cancelled.
        """
        errors: list[BaseException] = []

        def run() -> None:
            try:
                function()
            except BaseException as error:  # raised by the caller, which waits below
                errors.append(error)

        thread = threading.Thread(target=run, name="torsh-mpi-call", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if errors:
            raise errors[0]
        return not thread.is_alive()

    def _end(self, pid: int) -> None:
        """At interpreter exit: finalise MPI, unless this process failed or the others do not come.

        `MPI_Finalize` waits for every rank, forever; but mpiexec treats a process that exits without it as a crash and
        ends the whole job. So a rank that raised does not finalise, which ends the job at once; a rank that succeeded
        waits for the others without spinning, and finalises when all have arrived.
        """
        if os.getpid() != pid or not self.is_usable:
            return
        for wire in list(self._wires):
            wire.close()
        if getattr(sys, "last_value", None) is not None:
            self.forget_segment_names()
            return
        self.wait_asleep(self.world.Ibarrier(), _FINALIZE_TIMEOUT_S if self._abandoned else self._exit_timeout_s)
        if not self.call_within(self.mpi.Finalize, _FINALIZE_TIMEOUT_S):
            print(
                f"torsh_distributed: MPI could not be finalised within {_FINALIZE_TIMEOUT_S:g} s after an abort or a "
                "lost rank; this process ends with exit code 1",
                file=sys.stderr,
                flush=True,
            )
            sys.stdout.flush()
            os._exit(1)


@functools.cache
def library() -> MpiLibrary:
    """The MPI library of this process; loading it initialises nothing. FeatureNotAvailable says what is missing."""
    if find_spec("mpi4py") is None:
        raise FeatureNotAvailable("mpi4py is not installed", hint=INSTALL, backend="mpi4py")
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise FeatureNotAvailable(
            f"mpi4py finds no MPI library that it can load: {_last_line(error)}",
            hint=f"{INSTALL} brings MPICH; for another MPI set MPI4PY_LIBMPI to the path of its libmpi.so",
            backend="mpi4py",
            MPI4PY_LIBMPI=os.environ.get("MPI4PY_LIBMPI"),
        ) from error
    return MpiLibrary(MPI)


def missing_mpi() -> str:
    """Why MPI cannot be used in this process, or an empty string. Nothing is initialised."""
    try:
        library()
    except FeatureNotAvailable as error:
        return f"{error.message} ({error.hint})"
    return ""


def _last_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[-1]
