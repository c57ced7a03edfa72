"""Which of the tasks that may start goes next: one small class per strategy.

`choose` decides here and now, on this rank alone, among heads of streams. `order` decides for a batch, and must come
to the same order on every rank: it looks at nothing but what was submitted, never at a clock or a measurement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from itertools import chain, zip_longest

from typing_extensions import override

from torsh_distributed.comm.scheduler.bandwidth import BandwidthMonitor
from torsh_distributed.comm.scheduler.task import Task
from torsh_distributed.errors import InvalidArgument

AnyTask = Task[object]


class SchedulingStrategy(StrEnum):
    """The strategies by name."""

    FIFO = "fifo"
    PRIORITY = "priority"
    SHORTEST_FIRST = "shortest_first"
    ROUND_ROBIN = "round_robin"
    ADAPTIVE = "adaptive"


class Strategy(ABC):
    """A way to choose."""

    @abstractmethod
    def choose(self, heads: Sequence[AnyTask], now_s: float) -> AnyTask:
        """The one of `heads` (oldest first, at least one) that goes next."""

    @abstractmethod
    def order(self, batch: Sequence[AnyTask]) -> list[AnyTask]:
        """The tasks of a batch in the order that all ranks agree on."""

    def started(self, task: AnyTask) -> None:  # noqa: B027 - most strategies need not know
        """Learn that a task has started."""


class Fifo(Strategy):
    """In order of submission."""

    @override
    def choose(self, heads: Sequence[AnyTask], now_s: float) -> AnyTask:
        return heads[0]

    @override
    def order(self, batch: Sequence[AnyTask]) -> list[AnyTask]:
        return list(batch)


class MostUrgent(Strategy):
    """The highest priority first, then the oldest."""

    @override
    def choose(self, heads: Sequence[AnyTask], now_s: float) -> AnyTask:
        return max(heads, key=lambda task: task.priority)  # the first of equals, which is the oldest

    @override
    def order(self, batch: Sequence[AnyTask]) -> list[AnyTask]:
        return sorted(batch, key=lambda task: -task.priority)


class ShortestFirst(Strategy):
    """The fewest bytes first: the mean time to completion is then the least."""

    @override
    def choose(self, heads: Sequence[AnyTask], now_s: float) -> AnyTask:
        return min(heads, key=lambda task: task.num_bytes)

    @override
    def order(self, batch: Sequence[AnyTask]) -> list[AnyTask]:
        return sorted(batch, key=lambda task: task.num_bytes)


class RoundRobin(Strategy):
    """The group that was served longest ago: no group waits for another's long queue."""

    def __init__(self) -> None:
        self._turn = 0
        self._last_turns: dict[str, int] = {}

    @override
    def choose(self, heads: Sequence[AnyTask], now_s: float) -> AnyTask:
        return min(heads, key=lambda task: self._last_turns.get(task.group, 0))

    @override
    def started(self, task: AnyTask) -> None:
        self._turn += 1
        self._last_turns[task.group] = self._turn

    @override
    def order(self, batch: Sequence[AnyTask]) -> list[AnyTask]:
        by_group: defaultdict[str, list[AnyTask]] = defaultdict(list)
        for task in batch:
            by_group[task.group].append(task)
        rounds = chain.from_iterable(zip_longest(*by_group.values()))
        return [task for task in rounds if task is not None]


class Adaptive(Strategy):
    """The largest ratio of time waited to time needed, weighed by priority.

    Why: short and urgent ones go first, and what waits gains with every moment. The time needed comes from measured
    bandwidth; before the first measurement the most urgent, then the oldest goes.
    """

    def __init__(self, monitor: BandwidthMonitor) -> None:
        self._monitor = monitor
        self._unmeasured = MostUrgent()

    @override
    def choose(self, heads: Sequence[AnyTask], now_s: float) -> AnyTask:
        bandwidth = self._monitor.measured()
        if bandwidth is None:
            return self._unmeasured.choose(heads, now_s)

        def urgency(task: AnyTask) -> float:
            waited_s = now_s - task.submitted_s
            return (task.priority + 1) * (1 + waited_s / bandwidth.estimated_s(task.num_bytes))

        return max(heads, key=urgency)

    @override
    def order(self, batch: Sequence[AnyTask]) -> list[AnyTask]:
        return sorted(batch, key=lambda task: (-task.priority, task.num_bytes))


def make_strategy(name: SchedulingStrategy | str, monitor: BandwidthMonitor) -> Strategy:
    """The strategy of that name, or InvalidArgument with the names there are."""
    try:
        chosen = SchedulingStrategy(name)
    except ValueError:
        names = ", ".join(SchedulingStrategy)
        raise InvalidArgument("unknown scheduling strategy", hint=f"use one of: {names}", strategy=str(name)) from None
    match chosen:
        case SchedulingStrategy.FIFO:
            return Fifo()
        case SchedulingStrategy.PRIORITY:
            return MostUrgent()
        case SchedulingStrategy.SHORTEST_FIRST:
            return ShortestFirst()
        case SchedulingStrategy.ROUND_ROBIN:
            return RoundRobin()
        case SchedulingStrategy.ADAPTIVE:
            return Adaptive(monitor)
