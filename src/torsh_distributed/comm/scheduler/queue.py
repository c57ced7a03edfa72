"""Which tasks wait and which run, and the rules by which one may start. No threads and no clock in here.

Three rules make local reordering safe among real ranks:

1. Tasks of one *stream* start in their order, one at a time. A stream is all collectives of one group, or the
   messages of one kind to one peer under one tag: what the other side matches by order.
2. Across streams the strategy chooses freely, except that one slot is kept for the oldest task.
   Why that suffices: order all operations as a run without a scheduler would meet them. The first unfinished one is
   the oldest on each of its ranks, so it runs, or is about to, on all of them, and ends; then the next, and so on.
3. A task that did not start in time fails with everything behind it in its stream, then and later: the other ranks
   count it, and what follows would meet the wrong partner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from torsh_distributed.comm.scheduler.ordering import TaskChooser
from torsh_distributed.comm.scheduler.task import AnyTask


class TaskQueue:
    """Pending and running tasks. Not thread-safe: its owner holds a lock."""

    def __init__(self, chooser: TaskChooser, *, max_running: int) -> None:
        self._chooser = chooser
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

    def choose(self, now_s: float) -> AnyTask | None:
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
        return self._chooser.choose(heads, now_s) if heads else None

    def start(self, task: AnyTask, now_s: float) -> None:
        """Note that a chosen task runs."""
        self.pending.remove(task)
        self.running.add(task)
        task.started_s = now_s
        self._chooser.started(task)

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
