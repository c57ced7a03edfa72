"""A process that holds parameters: `ParameterServer`, and `serve`, which starts a new one whenever it is killed."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from torsh_distributed.comm.shared_memory.memory_file import make_kept_memory
from torsh_distributed.comm.store.registry import open_store
from torsh_distributed.errors import ProcessFailure
from torsh_distributed.rpc.job_store import job_store
from torsh_distributed.rpc.parameters.parameter_service import ParameterService
from torsh_distributed.rpc.rpc_worker import RpcWorker

_log = logging.getLogger(__name__)
SERVICE = "parameters"
"""The key of the object that a server offers."""
_START_S = 60.0
_MOST_QUICK_ENDS = 5
_QUICK_S = 1.0
_PARENT_DEATH_SIGNAL = 1


class ParameterServer:
    """Holds parameters under a name until it is closed, for clients that find it in the store.

    With `keep`, a directory, a later server continues where this one ended, however it ended; in /dev/shm that is as
    fast as without. A worker whose connection ended and that does not return within `lost_after_s` is not waited for.
    """

    def __init__(
        self,
        name: str,
        *,
        store: dist.Store | str | None = None,
        keep: str | Path | None = None,
        host: str | None = None,
        lost_after_s: float = 10.0,
    ) -> None:
        found = open_store(store) if isinstance(store, str) else job_store(_START_S) if store is None else store
        self._service = ParameterService(None if keep is None else Path(keep), lost_after_s=lost_after_s)
        try:
            self.worker = RpcWorker(name, found, host=host, objects={SERVICE: self._service})
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave; clients that call get CommunicationError until another server has the name."""
        self._service._stop()
        worker = getattr(self, "worker", None)
        if worker is not None:
            worker.close()
        self._service._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def serve(
    name: str, *, keep: str | Path | None = None, on_ready: Callable[[], None] | None = None, **options: Any
) -> None:
    """Run a server in a child process until SIGINT or SIGTERM, and start the next one at once if it is killed.

    `on_ready` is called in each child once workers can find it. The state is in `keep`, by default in shared memory
    that lives as long as this process. Call it in a process without threads: the child is a fork, so that the next one
    is there within milliseconds. ProcessFailure if the first child cannot begin, such as without a store.
    """
    begun = os.eventfd(0, os.EFD_CLOEXEC)

    def tell() -> None:
        os.eventfd_write(begun, 1)
        if on_ready is not None:
            on_ready()

    directory = make_kept_memory() if keep is None else Path(keep)
    _import_optimizers()
    try:
        supervise(
            lambda: _serve_once(name, tell, keep=directory, **options),
            has_begun=lambda: bool(select.select([begun], [], [], 0)[0]),
        )
    finally:
        os.close(begun)
        if keep is None and directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _import_optimizers() -> None:
    """What torch imports with the first step takes seconds: here once, not in every child."""
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    torch.optim.SGD([param], lr=0.0).step()


def _serve_once(name: str, on_ready: Callable[[], None], **options: Any) -> None:
    """The child: until SIGTERM."""
    with ParameterServer(name, **options):
        on_ready()
        signal.sigwait({signal.SIGTERM})


def supervise(run: Callable[[], None], *, has_begun: Callable[[], bool] = lambda: True) -> None:
    """Run `run` in a child until this process gets SIGINT or SIGTERM, which end it; again if it ends by itself.

    `run` has SIGTERM blocked, and returns when it receives it. ProcessFailure if it ends again and again at once, or
    once before `has_begun`: what never worked will not the next time.
    """
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    num_quick, status = 0, 0
    try:
        while num_quick < _MOST_QUICK_ENDS:
            start_s = time.monotonic()
            child = _fork(run)
            while (received := signal.sigwait(signals)) == signal.SIGCHLD:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    break
            if received != signal.SIGCHLD:
                os.kill(child, signal.SIGTERM)
                os.waitpid(child, 0)
                return
            # SIGKILL is somebody's decision, as often as they like; anything else at once would go on for ever.
            if not (has_begun() or _was_killed(status)):
                raise ProcessFailure(
                    f"the server could not begin: {_in_words(status)}", hint="its output above says why"
                )
            is_quick = time.monotonic() - start_s < _QUICK_S and not _was_killed(status)
            num_quick = num_quick + 1 if is_quick else 0
            _log.warning("the server ended (%s); the next one takes its place", _in_words(status))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    raise ProcessFailure(
        f"the server ended {num_quick} times at once, the last time by {_in_words(status)}",
        hint="its output says why; with a directory to keep, check that no other server uses it",
    )


def _fork(run: Callable[[], None]) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        # Without the parent nobody would remove the memory, or end this process.
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == parent:
            run()
            code = 0
    except BaseException:
        _log.exception("the server failed")
    finally:
        os._exit(code)


def _was_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _in_words(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.waitstatus_to_exitcode(status)}"
