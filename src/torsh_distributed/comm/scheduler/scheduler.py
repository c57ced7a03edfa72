"""The communication scheduler: operations wait in a queue and start in an order that cannot deadlock; see `queue`."""

from __future__ import annotations

import atexit
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import torch.distributed as dist

from torsh_distributed.comm.scheduler.queue import AnyTask, Priority, ScheduledWork, TaskQueue
from torsh_distributed.comm.scheduler.rate import BandwidthMonitor, TokenBucket
from torsh_distributed.errors import CommunicationError, InvalidArgument, OperationTimeout


@dataclass(kw_only=True)
class SchedulerStats:
    """What a scheduler did so far; means are None while there is nothing to average."""

    num_submitted: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    """Tasks that were pending when the scheduler was closed after an error or a timeout."""
    num_expired: int = 0
    """Tasks that did not start before their deadline, and those behind them in their stream."""
    num_running: int = 0
    queue_size: int = 0
    peak_queue_size: int = 0
    num_bytes: int = 0
    """Bytes of the tasks that completed."""
    total_queue_s: float = 0.0
    """From submission to start, over all tasks that started."""
    total_run_s: float = 0.0
    """From start to end, over all tasks that ended."""
    bytes_per_s: float | None = None
    """Bandwidth measured over the last ten seconds; None if nothing travelled."""
    rate_limit_bytes_per_s: float | None = None

    @property
    def mean_queue_s(self) -> float | None:
        """From submission to start."""
        num_started = self.num_completed + self.num_failed + self.num_running
        return self.total_queue_s / num_started if num_started else None

    @property
    def mean_run_s(self) -> float | None:
        """From start to end."""
        num_ended = self.num_completed + self.num_failed
        return self.total_run_s / num_ended if num_ended else None


R = TypeVar("R")

_IDLE_S = 1.0
_EXIT_S = 5.0
_now_s = time.monotonic
_schedulers: weakref.WeakSet[CommunicationScheduler] = weakref.WeakSet()


@atexit.register
def _let_threads_finish() -> None:
    """At interpreter exit, bounded: a thread caught inside torch at that moment would crash the process."""
    deadline_s = _now_s() + _EXIT_S
    for scheduler in list(_schedulers):
        scheduler._settle(deadline_s - _now_s())


class CommunicationScheduler:
    """Runs operations in threads of its own: urgent ones first, at a limited rate, a few at a time.

    Threads start when there is work and end when there is none; `close`, or leaving the `with` block, waits for what
    was submitted.
    """

    def __init__(
        self,
        *,
        max_concurrent_ops: int = 4,
        rate_limit_bytes_per_s: float | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        for name, value in (("max_concurrent_ops", max_concurrent_ops), ("timeout_s", timeout_s)):
            if value <= 0:
                raise InvalidArgument(f"{name} must be above zero", got=value)
        self._monitor = BandwidthMonitor()
        self._queue = TaskQueue(max_running=max_concurrent_ops)
        self._max_threads = max_concurrent_ops + 1  # one more than may run, to watch the queue
        self._timeout_s = timeout_s
        self._bucket = _bucket(rate_limit_bytes_per_s)
        self._stats = SchedulerStats()
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._at_rest = threading.Condition(lock)
        self._num_threads = 0
        self._num_idle = 0
        self._is_closed = False
        _schedulers.add(self)

    def submit(
        self,
        op: str,
        call: Callable[[], R],
        *,
        num_bytes: int,
        group: dist.ProcessGroup | None = None,
        peer: int | None = None,
        tag: int = 0,
        priority: Priority = Priority.NORMAL,
        timeout_s: float | None = None,
    ) -> ScheduledWork[R]:
        """Run `call`, which does the operation and returns its result, when its turn comes.

        A collective names its `group` (None: the world); a message also its `peer` and `tag`. Collectives of one group
        are submitted by one thread, in the same order on every rank, and only through one scheduler. `timeout_s`
        bounds the wait for the start; the operation has a deadline of its own.
        """
        now_s = _now_s()
        task = ScheduledWork(
            op=op,
            call=call,
            group="world" if group is None else group.group_name,
            peer=peer,
            tag=tag,
            num_bytes=num_bytes,
            priority=priority,
            submitted_s=now_s,
            deadline_s=now_s + (self._timeout_s if timeout_s is None else timeout_s),
        )
        with self._changed:
            if self._is_closed:
                raise CommunicationError("the scheduler was closed", hint="make a new one", operation=op)
            if task.stream in self._queue.lost_streams:
                raise _out_of_step(task)
            self._queue.add(task)
            self._stats.num_submitted += 1
            self._stats.peak_queue_size = max(self._stats.peak_queue_size, len(self._queue.pending))
            self._ensure_thread()
            self._changed.notify_all()
        return task

    # --- running ----------------------------------------------------------------------------------------------

    def _ensure_thread(self) -> None:
        """While tasks are pending some thread must watch the queue; called under the lock."""
        if self._queue.pending and self._num_idle == 0 and self._num_threads < self._max_threads:
            self._num_threads += 1
            threading.Thread(target=self._serve, name="torsh-scheduler", daemon=True).start()

    def _serve(self) -> None:
        while (job := self._next_job()) is not None:
            job()

    def _next_job(self) -> Callable[[], None] | None:
        """What this thread does next, outside of the lock; None when it is no longer needed."""
        with self._changed:
            while True:
                now_s = _now_s()
                expired = self._queue.expire(now_s)
                if expired:
                    self._stats.num_expired += len(expired)
                    self._changed.notify_all()
                    return partial(_complete_expired, expired)
                task = self._queue.choose()
                delay_s = 0.0 if task is None or self._bucket is None else self._bucket.delay_s(task.num_bytes)
                if task is not None and delay_s == 0.0:
                    self._start(task, now_s)
                    return partial(self._run, task)
                if not self._sleep(now_s, None if task is None else delay_s):
                    self._num_threads -= 1
                    self._at_rest.notify_all()
                    return None

    def _sleep(self, now_s: float, delay_s: float | None) -> bool:
        """Wait for a change, for tokens or for the next deadline; False if this thread should end."""
        if not self._queue.pending and self._is_closed:
            return False
        limits = [task.deadline_s - now_s for task in self._queue.pending]
        if delay_s is not None:
            limits.append(delay_s)
        self._num_idle += 1
        if self._num_idle == self._num_threads:
            self._at_rest.notify_all()
        was_changed = self._changed.wait(min(limits, default=_IDLE_S))
        self._num_idle -= 1
        return was_changed or bool(self._queue.pending)

    def _start(self, task: AnyTask, now_s: float) -> None:
        if self._bucket is not None:
            self._bucket.take(task.num_bytes)
        self._queue.start(task, now_s)
        self._stats.total_queue_s += now_s - task.submitted_s
        self._ensure_thread()

    def _run(self, task: AnyTask) -> None:
        error = task.run()
        ended_s, started_s = _now_s(), task.started_s
        assert started_s is not None, "it was started"
        if error is None:
            self._monitor.add(task.num_bytes, started_s, ended_s)
        with self._changed:
            self._queue.running.discard(task)
            self._stats.total_run_s += ended_s - started_s
            if error is None:
                self._stats.num_completed += 1
                self._stats.num_bytes += task.num_bytes
            else:
                self._stats.num_failed += 1
            self._changed.notify_all()
        task.complete(error)

    # --- asking and ending --------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """What happened so far."""
        with self._changed:
            return dataclasses.replace(
                self._stats,
                num_running=len(self._queue.running),
                queue_size=len(self._queue.pending),
                bytes_per_s=self._monitor.measured(),
                rate_limit_bytes_per_s=None if self._bucket is None else self._bucket.bytes_per_s,
            )

    def set_rate_limit(self, bytes_per_s: float | None) -> None:
        """A new ceiling from now on; None for no ceiling."""
        with self._changed:
            self._bucket = _bucket(bytes_per_s)
            self._changed.notify_all()

    def close(self, timeout_s: float | None = None) -> None:
        """Accept nothing further, wait until everything submitted is over, end the threads.

        OperationTimeout after `timeout_s` (default: the scheduler's); what is still pending is then cancelled.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._at_rest.wait_for(lambda: self._num_threads == 0, limit_s)
            left = [*self._queue.running, *self._queue.pending]
        if left:
            self._cancel_pending()
            raise OperationTimeout(
                f"{len(left)} operations were not over within {limit_s:g} s of closing the scheduler",
                hint="a peer did not take part: look at its output",
                operation=left[0].op,
                group=left[0].group,
            )

    def _settle(self, timeout_s: float) -> None:
        """Cancel what is pending, then wait until all threads are idle, at most `timeout_s`."""
        self._cancel_pending()
        with self._changed:
            self._at_rest.wait_for(lambda: self._num_idle == self._num_threads, timeout_s)

    def _cancel_pending(self) -> None:
        with self._changed:
            pending = list(self._queue.pending)
            self._queue.pending.clear()
            self._stats.num_cancelled += len(pending)
            self._changed.notify_all()
        for task in pending:
            task.complete(
                CommunicationError(
                    f"{task.op} was cancelled before it started",
                    hint="the scheduler was closed after an error or a timeout",
                    operation=task.op,
                    group=task.group,
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._cancel_pending()
        self.close()


def _bucket(bytes_per_s: float | None) -> TokenBucket | None:
    return None if bytes_per_s is None else TokenBucket(bytes_per_s)


def _complete_expired(expired: Sequence[AnyTask]) -> None:
    overdue, *behind = expired
    waited_s = overdue.deadline_s - overdue.submitted_s
    overdue.complete(
        OperationTimeout(
            f"{overdue.op} did not start within {waited_s:g} s of being submitted",
            hint="the operations in front are slow or hang; their own errors say why",
            operation=overdue.op,
            group=overdue.group,
            num_bytes=overdue.num_bytes,
        )
    )
    for task in behind:
        task.complete(_out_of_step(task))


def _out_of_step(task: AnyTask) -> CommunicationError:
    return CommunicationError(
        f"{task.op} cannot run: an operation before it did not start in time, and the ranks are out of step",
        hint="take the group down and make a new one, with a new scheduler",
        operation=task.op,
        group=task.group,
        peer=task.peer,
    )
