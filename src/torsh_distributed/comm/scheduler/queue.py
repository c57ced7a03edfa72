"""Which tasks wait and which run, and the rules by which one may start. No threads and no clock in here.

Three rules make local reordering safe among real ranks:

1. Tasks of one *stream* start in their order, one at a time. A stream is all collectives of one group, or the
   messages of one kind to one peer under one tag: what the other side matches by order.
2. Across streams the highest priority goes first, the oldest of equals; one slot is kept for the oldest task.
   Why that suffices: order all operations as a run without a scheduler would meet them. The first unfinished one is
   the oldest on each of its ranks, so it runs, or is about to, on all of them, and ends; then the next, and so on.
3. A task that did not start in time fails with everything behind it in its stream, then and later: the other ranks
   count it, and what follows would meet the wrong partner.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, TypeVar

import torch

from torsh_distributed.errors import OperationTimeout

R = TypeVar("R")


class Priority(IntEnum):
    """How urgent something is; the larger goes first."""

    LOW = 0
    NORMAL = 1
    MEDIUM = 1
    HIGH = 2
    CRITICAL = 3


@dataclass(eq=False, kw_only=True)
class ScheduledWork(Generic[R]):
    """An operation that was submitted and may not have started yet."""

    op: str
    call: Callable[[], R]
    group: str
    peer: int | None = None
    tag: int = 0
    num_bytes: int
    priority: Priority = Priority.NORMAL
    submitted_s: float
    deadline_s: float
    """By when it must have started."""
    started_s: float | None = None
    sequence: int = 0
    """Its number in the queue."""
    _result: R = field(init=False, repr=False)
    _error: BaseException | None = None
    _is_over: threading.Event = field(default_factory=threading.Event, repr=False)
    _future: torch.futures.Future[R] = field(default_factory=torch.futures.Future, repr=False)

    @property
    def stream(self) -> Hashable:
        """What keeps its order: the collectives of a group, or the messages of one kind to one peer under one tag."""
        return self.group if self.peer is None else (self.group, self.op, self.peer, self.tag)

    def wait(self, timeout_s: float | None = None) -> R:
        """The operation's result, or what it raised, as often as it is called.

        Without a limit the wait ends with the task: by the deadline for its start, or by the operation's own deadline.
        OperationTimeout after `timeout_s` ends the waiting, not the task.
        """
        if not self._is_over.wait(timeout_s):
            raise OperationTimeout(
                f"{self.op} was not done within the {timeout_s:g} s given to wait()",
                hint="the task goes on: wait again",
                operation=self.op,
                group=self.group,
                has_started=self.started_s is not None,
            )
        if self._error is not None:
            raise self._error
        return self._result

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._is_over.is_set()

    def exception(self) -> BaseException | None:
        """What went wrong, if the task is over and failed; does not wait."""
        return self._error

    def get_future(self) -> torch.futures.Future[R]:
        """A torch future of the result, as DDP's hooks return it; its callbacks run in the thread that ran the task."""
        return self._future

    def run(self) -> BaseException | None:
        """Do the operation; returns what it raised. `complete` then releases the waiting."""
        try:
            self._result = self.call()
        except BaseException as error:  # raised where the result is waited for, not in the scheduler's thread
            return error
        return None

    def complete(self, error: BaseException | None = None) -> None:
        """End the task. Not under the scheduler's lock: callbacks of the future run here."""
        self._error = error
        self._is_over.set()
        if error is None:
            self._future.set_result(self._result)
        else:
            # torch takes an Exception only; an interrupt in a worker thread ends the operation like any failure.
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._future.set_exception(failure)  # type: ignore[arg-type]  # torch's stub says it takes a result


AnyTask = ScheduledWork[Any]
"""A task whatever its result: the scheduler only hands results on."""


class TaskQueue:
    """Pending and running tasks. Not thread-safe: its owner holds a lock."""

    def __init__(self, *, max_running: int) -> None:
        self._max_running = max_running
        self._num_added = 0
        self.pending: deque[AnyTask] = deque()
        """Oldest first."""
        self.running: set[AnyTask] = set()
        self.lost_streams: set[Hashable] = set()
        """Streams in which something did not start in time: nothing more may run in them."""

    def add(self, task: AnyTask) -> None:
        """Put a task at the end."""
        self._num_added += 1
        task.sequence = self._num_added
        self.pending.append(task)

    def choose(self) -> AnyTask | None:
        """The task that may start now, by the rules above."""
        num_free = self._max_running - len(self.running)
        if num_free <= 0 or not self.pending:
            return None
        oldest = self.pending[0]
        is_oldest_running = any(task.sequence < oldest.sequence for task in self.running)
        if num_free == 1 and not is_oldest_running:
            return oldest
        busy = {task.stream for task in self.running}
        heads = []
        for task in self.pending:
            if task.stream not in busy:
                busy.add(task.stream)
                heads.append(task)
        return max(heads, key=lambda task: task.priority, default=None)

    def start(self, task: AnyTask, now_s: float) -> None:
        """Note that a chosen task runs."""
        self.pending.remove(task)
        self.running.add(task)
        task.started_s = now_s

    def expire(self, now_s: float) -> list[AnyTask]:
        """Take out the first task that is overdue, and behind it in the list those of its stream."""
        overdue = next((task for task in self.pending if task.deadline_s <= now_s), None)
        if overdue is None:
            return []
        self.lost_streams.add(overdue.stream)
        lost = [overdue, *(task for task in self.pending if task.stream == overdue.stream and task is not overdue)]
        for task in lost:
            self.pending.remove(task)
        return lost
