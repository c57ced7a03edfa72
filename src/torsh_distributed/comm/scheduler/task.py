"""An operation that waits for its turn: what the scheduler knows of it and the handle its submitter holds."""

from __future__ import annotations

import threading
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
