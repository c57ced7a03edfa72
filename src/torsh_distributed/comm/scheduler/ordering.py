"""Which of the tasks that may start goes next, by one of five strategies. Decided on this rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import count

from torsh_distributed.comm.scheduler.bandwidth import BandwidthMonitor
from torsh_distributed.comm.scheduler.task import AnyTask
from torsh_distributed.errors import InvalidArgument


class SchedulingStrategy(StrEnum):
    """How the next task is chosen; ties go to the oldest."""

    FIFO = "fifo"
    """In order of submission."""
    PRIORITY = "priority"
    """The highest priority."""
    SHORTEST_FIRST = "shortest_first"
    """The fewest bytes: the mean time to completion is then the least."""
    ROUND_ROBIN = "round_robin"
    """The group that was served longest ago: no group waits for another's long queue."""
    ADAPTIVE = "adaptive"
    """The largest ratio of time waited to time needed by measured bandwidth, weighed by priority; until something is
    measured, the highest priority. Short and urgent tasks go first, and a task gains while it waits."""


class TaskChooser:
    """Chooses among tasks by a strategy."""

    def __init__(self, strategy: SchedulingStrategy | str, monitor: BandwidthMonitor) -> None:
        try:
            self._strategy = SchedulingStrategy(strategy)
        except ValueError:
            names = ", ".join(SchedulingStrategy)
            raise InvalidArgument(
                "unknown scheduling strategy", hint=f"use one of: {names}", strategy=str(strategy)
            ) from None
        self._monitor = monitor
        self._turns = count(1)
        self._last_turns: dict[str, int] = {}

    def choose(self, heads: Sequence[AnyTask], now_s: float) -> AnyTask:
        """The one of `heads` (oldest first, at least one) that goes next."""
        match self._strategy:
            case SchedulingStrategy.FIFO:
                return heads[0]
            case SchedulingStrategy.SHORTEST_FIRST:
                return min(heads, key=lambda task: task.num_bytes)
            case SchedulingStrategy.ROUND_ROBIN:
                return min(heads, key=lambda task: self._last_turns.get(task.group, 0))
            case SchedulingStrategy.ADAPTIVE if (bandwidth := self._monitor.measured()) is not None:
                return max(
                    heads,
                    key=lambda task: (
                        (task.priority + 1) * (1 + (now_s - task.submitted_s) / bandwidth.estimated_s(task.num_bytes))
                    ),
                )
            case _:
                return max(heads, key=lambda task: task.priority)

    def started(self, task: AnyTask) -> None:
        """Note that a task has started."""
        self._last_turns[task.group] = next(self._turns)
