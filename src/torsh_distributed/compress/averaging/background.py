"""Averages in the background, one after the other, while backward goes on.

One thread for each pipeline: all ranks hand in their buckets in the same order, so all ranks' collectives start in the
same order, and no bucket's second collective can overtake another's first. The thread has a group of its own, for two
threads on one group have no order.
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
from torsh_distributed.errors import CommunicationError, TorshError

_log = logging.getLogger(__name__)

_FAILURE = "pipeline/failure"

Job = Callable[[dist.ProcessGroup], None]
"""Something to do with the pipeline's group."""

Done = Callable[[BaseException | None], None]
"""Told, in the background, how a job ended."""


class Pipeline:
    """Runs jobs in order on a second group over the same ranks; every rank of `group` makes one.

    A job that fails ends the pipeline, here and on the other ranks: their jobs fail too, with the reason of the first.
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
        """Run `job` after all before it, and wait for its end."""
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
            except BaseException as raised:  # it belongs to whoever handed the job in
                error = self._failure = self._explain(raised)
        if self._stream is None:
            done(error)
        else:
            with torch.cuda.stream(self._stream):  # what `done` hands on is ready when this stream is
                done(error)

    def _explain(self, raised: BaseException) -> TorshError:
        """Tell the other ranks, and find out whether it is they who told us."""
        first = self._first_failure(raised)
        if first is None:
            error = raised if isinstance(raised, TorshError) else _wrapped(raised)
            reason = f"rank {dist.get_rank()}: {type(raised).__name__}: {_first_line(raised)}"
        else:
            reason = first
            error = CommunicationError(
                f"gradients could not be averaged; the first to fail was {reason}",
                hint="look at that rank; the gradients of this step are worth nothing",
                group=self._group.group_name,
            )
            error.__cause__ = raised
        try:
            abort(reason, group=self._group)
        except (TorshError, RuntimeError) as problem:
            _log.warning("the other ranks may notice only at their deadline: %s", problem)
        return error

    def _first_failure(self, raised: BaseException) -> str | None:
        """What the rank that failed first left in the store; None for that rank itself."""
        mine = f"rank {dist.get_rank()}: {type(raised).__name__}: {_first_line(raised)}"
        try:
            store = self._group.get_group_store()
            if isinstance(raised, CommunicationError):
                # Most likely another rank's doing, which has left its reason before it cut the connections.
                return store.get(_FAILURE).decode() if store.check([_FAILURE]) else None
            found = store.compare_set(_FAILURE, "", mine).decode()
        except (RuntimeError, TorshError, OSError) as problem:  # the store is gone with the rank that hosted it
            _log.warning("why the others failed cannot be known: %s", problem)
            return None
        return None if found == mine else found


def _wrapped(raised: BaseException) -> TorshError:
    error = TorshError(
        f"gradients could not be averaged: {type(raised).__name__}: {_first_line(raised)}",
        hint="the cause is in the traceback; the other ranks were told",
    )
    error.__cause__ = raised
    return error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
