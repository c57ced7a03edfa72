"""The handle of an operation under way: wait for it with a deadline, ask whether it is done."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from torsh_distributed.comm.backends.lifecycle import GroupLifecycle
from torsh_distributed.comm.groups.abort import aborted, is_aborted
from torsh_distributed.comm.meeting.monitored_barrier import missing_ranks
from torsh_distributed.comm.recording.flight_recorder import OperationRecord, recorder
from torsh_distributed.errors import CommunicationError, InvalidArgument, OperationTimeout, TorshError, first_line

R = TypeVar("R")


class Work(Generic[R]):
    """The result of an operation that may still be under way.

    `wait` returns the result, or raises what went wrong, as often as it is called. After a failure the tensors
    involved are invalid and the group must be taken down.
    """

    def __init__(
        self,
        pending: dist.Work | None,
        finish: Callable[[], R],
        *,
        record: OperationRecord,
        group: dist.ProcessGroup,
        timeout_s: float | None,
    ) -> None:
        self._pending = pending
        self._finish = finish
        self._record = record
        # Weak: callbacks run on the backend's own thread, and a group that is freed there cannot join that thread.
        self._group = weakref.ref(group)
        self._timeout_s = timeout_s
        self._is_done = False
        self._result: R
        self._error: TorshError | None = None

    def wait(self, timeout_s: float | None = None) -> R:
        """Wait for the result and return it; OperationTimeout, naming the missing ranks, if it does not come in time.

        The operation's own deadline counts from its start, however late this is called; `timeout_s` counts from now.
        """
        if not self._is_done:
            try:
                if self._pending is not None:
                    self._wait(timeout_s)
                self._result = self._finish()
            except TorshError as error:
                self._error = error
            self._is_done = True
            recorder.end(self._record, self._error)
        if self._error is not None:
            raise self._error
        return self._result

    def get_future(self) -> torch.futures.Future[R]:
        """The result as a torch future, such as DDP's hooks return, for callbacks instead of `wait`."""
        assert self._pending is not None, "an operation started with async_op has a handle"

        def settle(done: torch.futures.Future[Any]) -> R:
            # Not self._pending.wait(): gloo runs this callback before it marks the operation complete.
            try:
                done.value()
                self._result = self._finish()
            except TorshError as error:
                self._error = error
            except RuntimeError as error:
                self._error = explain(error, self._group(), self._record, self._record.start_s, self._timeout_s)
            self._is_done = True
            recorder.end(self._record, self._error)
            if self._error is not None:
                raise self._error
            return self._result

        return self._pending.get_future().then(settle)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._is_done or self._pending is None or self._pending.is_completed()

    def exception(self) -> TorshError | None:
        """What went wrong, if the operation is over and failed; does not wait."""
        if not self._is_done and self.is_completed():
            try:
                self.wait()
            except TorshError as error:
                return error
        return self._error

    def _wait(self, timeout_s: float | None) -> None:
        assert self._pending is not None
        started, limit_s = self._record.start_s, self._timeout_s
        if timeout_s is not None:
            started, limit_s = time.monotonic(), timeout_s
        try:
            if limit_s is None:
                self._pending.wait()
            else:
                remaining_s = started + limit_s - time.monotonic()
                # c10d takes 0 for no limit; an operation that is done already needs no time.
                self._pending.wait(timedelta(seconds=max(remaining_s, 0.001)))
        except TorshError as error:
            # Our backends say only that the wait was too long; who is missing is found here, for all backends.
            if limit_s is None or not isinstance(error, OperationTimeout) or self._pending.is_completed():
                raise
            raise explain(error, self._group(), self._record, started, limit_s) from error
        except (RuntimeError, TimeoutError) as error:
            raise explain(error, self._group(), self._record, started, limit_s) from error


def explain(
    error: Exception, group: dist.ProcessGroup | None, record: OperationRecord, started: float, timeout_s: float | None
) -> TorshError:
    """Our error for c10d's: the clock tells a deadline, where missing ranks are named, from a broken connection."""
    if group is None:
        return CommunicationError(
            f"{record.op} failed: the group was taken down while it was under way",
            hint="wait for operations before destroy_process_group()",
            operation=record.op,
            group=record.group,
        )
    if is_aborted(group):
        return aborted(group, record.op)
    limit_s = group_timeout_s(group) if timeout_s is None else timeout_s
    facts: dict[str, Any] = {
        "operation": record.op,
        "group": record.group,
        "sequence": record.sequence,
        "call_site": record.call_site,
    }
    if "Invalid scalar type" in str(error):  # gloo's words, before anything is sent
        return InvalidArgument(
            f"gloo has no {record.op} for tensors of this dtype",
            hint="set distributed.backend to shm or torsh, which sum and copy float8 too, or send it as another dtype",
            **facts,
        )
    if time.monotonic() - started < limit_s * 0.98:
        return CommunicationError(
            f"{record.op} failed: {first_line(error)}",
            hint="a peer is gone or closed its connection: look at the first rank that failed",
            **facts,
        )
    missing = missing_ranks(group, f"{record.op}/{record.sequence}")
    who = f"missing: ranks {', '.join(map(str, missing))}" if missing else "all ranks wait, but not for the same thing"
    return OperationTimeout(f"{record.op} did not end within {limit_s:g} s; {who}", missing_ranks=missing, **facts)


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """The deadline the group was created with; torch's default where it cannot be known."""
    backends = [group._get_backend(device) for device in group._device_types]
    timeouts = [backend.timeout_s for backend in backends if isinstance(backend, GroupLifecycle)]
    timeouts += [backend.options._timeout.total_seconds() for backend in backends if hasattr(backend, "options")]
    return max(timeouts, default=default_pg_timeout.total_seconds())
