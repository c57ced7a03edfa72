"""BackgroundExecutor: runs averages one after the other on a thread while backward continues.

All ranks submit their buckets in the same order and each executor has one thread, so all ranks' collectives start in
the same order, and no bucket's second collective can overtake another's first. The thread has its own group, because
collectives of two threads on one group have no order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue

import torch
import torch.distributed as dist

from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.comm.groups.manager import twin_group
from torsh_distributed.comm.serial_thread import SerialThread
from torsh_distributed.errors import CommunicationError, TorshError, first_line

_log = logging.getLogger(__name__)

_FAILURE = "background/failure"

Job = Callable[[dist.ProcessGroup], None]
"""A function that runs with the executor's group."""

Done = Callable[[BaseException | None], None]
"""Called on the background thread with the error of a job, or None."""


class BackgroundExecutor:
    """Runs jobs in order on a second group over the same ranks; every rank of `group` makes one.

    After a job has failed no other runs, here and on the other ranks: their jobs fail too, with the first one's reason.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = twin_group(group)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # untyped in torch
        self._failure: TorshError | None = None
        self._thread = SerialThread("torsh-compress")

    @property
    def group(self) -> dist.ProcessGroup:
        """The group the jobs run on."""
        return self._group

    def submit(self, job: Job, done: Done) -> None:
        """Run `job` after all before it, then call `done` with its error or None, in the same thread."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream(self._stream.device).record_event()
        self._thread.submit(self._run, job, done, ready)

    def run(self, job: Job) -> None:
        """Run `job` after all before it, and wait until it ends."""
        ended: SimpleQueue[BaseException | None] = SimpleQueue()
        self.submit(job, ended.put)
        error = ended.get()  # every collective in the job has a deadline, so this ends
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread after what was handed in."""
        self._thread.stop()

    def _run(self, job: Job, done: Done, ready: torch.cuda.Event | None) -> None:
        error: BaseException | None = self._failure
        if error is None:
            try:
                if self._stream is None or ready is None:
                    job(self._group)
                else:
                    self._stream.wait_event(ready)
                    with torch.cuda.stream(self._stream):
                        job(self._group)
            except BaseException as raised:  # `done` passes it on
                error = self._failure = self._explain(raised)
        if self._stream is None:
            done(error)
        else:
            with torch.cuda.stream(self._stream):  # what `done` passes on is ready when this stream is
                done(error)

    def _explain(self, raised: BaseException) -> TorshError:
        """Report the failure to the other ranks, or find the one that failed first."""
        first = self._first_failure(raised)
        if first is None:
            error = raised if isinstance(raised, TorshError) else _wrapped(raised)
            reason = f"rank {dist.get_rank()}: {type(raised).__name__}: {first_line(raised)}"
        else:
            reason = first
            error = CommunicationError(
                f"gradients could not be averaged; the first to fail was {reason}",
                hint="look at that rank; the gradients of this step are invalid",
                group=self._group.group_name,
            )
            error.__cause__ = raised
        try:
            abort(reason, group=self._group)
        except (TorshError, RuntimeError) as problem:
            _log.warning("the other ranks may notice only at their deadline: %s", problem)
        return error

    def _first_failure(self, raised: BaseException) -> str | None:
        """What the rank that failed first wrote to the store; None on that rank itself."""
        mine = f"rank {dist.get_rank()}: {type(raised).__name__}: {first_line(raised)}"
        try:
            store = self._group.get_group_store()
            if isinstance(raised, CommunicationError):
                # Most likely caused by another rank, which wrote its reason before it cut the connections.
                return store.get(_FAILURE).decode() if store.check([_FAILURE]) else None
            found = store.compare_set(_FAILURE, "", mine).decode()
        except (RuntimeError, TorshError, OSError) as problem:  # the store went down with the rank that hosted it
            _log.warning("the reason of other ranks cannot be read: %s", problem)
            return None
        return None if found == mine else found


def _wrapped(raised: BaseException) -> TorshError:
    error = TorshError(
        f"gradients could not be averaged: {type(raised).__name__}: {first_line(raised)}",
        hint="the cause is in the traceback; the other ranks raise too",
    )
    error.__cause__ = raised
    return error
