"""Workers whose script has come to its end but whose process has not: who they are, where they hang, and their end.

Python waits for threads that are not daemons and for `atexit` handlers, without a limit. A job would wait for ever for
a rank whose work is done, so it is told about after a while and ended after a longer one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.worker.rank_status import RankStatus

_NOTICE_S = 10.0
_ANSWER_S = 1.0


class LeavingWatch:
    """Watches the workers of one attempt on a node, from the status with which their script ends.

    `ask` makes every worker say what it does; `end` is called with a rank and the reason after `limit_s`.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        limit_s: float,
        ask: Callable[[], None],
        warn: Callable[[str], None],
        end: Callable[[int, str], None],
    ) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._notice_s = min(_NOTICE_S, limit_s / 2)
        self._ask, self._warn, self._end = ask, warn, end
        self._leaving: dict[int, RankStatus] = {}
        self._untold: set[int] = set()
        self._timers: list[Timer] = []

    def note(self, status: RankStatus) -> None:
        """A worker says that its script has ended, or where it is since."""
        rank = status.rank
        if status.has_finished and rank not in self._leaving:
            self._leaving[rank] = status
            self._timers.append(self._loop.call_later(self._notice_s, partial(self._question, rank)))
            self._timers.append(self._loop.call_later(self._limit_s, partial(self._give_up, rank)))
        elif rank in self._leaving and not status.has_finished:
            self._leaving[rank] = status
            self._tell(rank)

    def forget(self, rank: int | None) -> None:
        """The worker has ended."""
        if rank is not None:
            self._leaving.pop(rank, None)
            self._untold.discard(rank)

    def close(self) -> None:
        """Watch no more."""
        for timer in self._timers:
            timer.cancel()
        self._leaving = {}

    def _question(self, rank: int) -> None:
        if rank in self._leaving:
            self._untold.add(rank)
            self._timers.append(self._loop.call_later(_ANSWER_S, partial(self._tell, rank)))
            self._ask()

    def _tell(self, rank: int) -> None:
        if rank not in self._untold or rank not in self._leaving:
            return
        self._untold.discard(rank)
        status = self._leaving[rank]
        left_s = self._limit_s - self._notice_s
        head = f"rank {rank} has come to the end of its script, but its process does not end: {status.whereabouts}"
        lines = [f"{head}; it is ended in {left_s:g} s (--exit-timeout)", *(f"  {line}" for line in status.stack)]
        self._warn("\n".join(lines))

    def _give_up(self, rank: int) -> None:
        status = self._leaving.get(rank)
        if status is not None:
            self._end(rank, f"its script ended, its process did not within {self._limit_s:g} s: {status.whereabouts}")
