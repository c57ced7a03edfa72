"""The launcher's side of a change of the plan: all ranks take it before the same update, or none does.

One change at a time. Every rank is asked where it could stop and stays there until it hears again; the last of these
places is where all of them change. A rank that does not answer in time is a reason to change nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torsh_distributed.launch.local.failure_report import LauncherOutput, join_numbers
from torsh_distributed.launch.local.loop import Loop, Timer

_ANSWER_S = 5.0
_RETRY_S = 1.0
_MAX_RETRIES = 30
_MAX_WAITING = 16


@dataclass(frozen=True)
class ChangeWord:
    """What a worker says about change `number`."""

    number: int
    what: str
    """ready, changed or refused."""
    at: int
    """The update that it has yet to begin."""
    step: int
    detail: str


@dataclass
class _Round:
    """A change under way: what the ranks have said."""

    number: int
    change: str
    reason: str
    ranks: tuple[int, ...]
    ready: dict[int, int] = field(default_factory=dict)
    done: dict[int, ChangeWord] = field(default_factory=dict)
    is_committed: bool = False


class PlanChanges:
    """The changes of one attempt. `tell` sends a record's fields to all workers."""

    def __init__(
        self,
        loop: Loop,
        output: LauncherOutput,
        *,
        ranks: Callable[[], Sequence[int]],
        is_settled: Callable[[], bool],
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._loop = loop
        self._output = output
        self._ranks = ranks
        self._is_settled = is_settled
        self._tell = tell
        self._waiting: deque[tuple[str, str]] = deque()
        self._round: _Round | None = None
        self._number = 0
        self._num_retries = 0
        self._timer: Timer | None = None
        self._is_closed = False

    def want(self, change: str, reason: str) -> None:
        """A rule asks for a change, as JSON; it follows those that were asked for before."""
        if self._is_closed or len(self._waiting) >= _MAX_WAITING:
            self._output.warn(f"the plan does not change ({reason}): too many changes wait, or the job ends")
            return
        self._waiting.append((change, reason))
        if self._round is None and self._timer is None:
            self._start()

    def said(self, rank: int, word: ChangeWord) -> None:
        """A worker's word; that on an older change is of no interest any more."""
        current = self._round
        if current is None or word.number != current.number or rank not in current.ranks:
            return
        if word.what == "ready" and not current.is_committed:
            current.ready[rank] = word.at
            if len(current.ready) == len(current.ranks):
                self._commit(current)
        elif current.is_committed:
            current.done[rank] = word
            if len(current.done) == len(current.ranks):
                self._finish(current)

    def cancel(self, why: str) -> None:
        """Give up a change that is not agreed on yet; one that is will be taken."""
        current = self._round
        if current is None:
            return
        if not current.is_committed:
            self._tell({"number": current.number, "what": "cancel"})
            self._output.warn(f"the plan does not change ({current.reason}): {why}")
        self._next()

    def close(self) -> None:
        """The attempt is over."""
        self._is_closed = True
        self._waiting.clear()
        self._round = None
        self._stop_timer()

    def _start(self) -> None:
        self._timer = None
        if self._is_closed or not self._waiting:
            return
        if not self._is_settled() and self._num_retries < _MAX_RETRIES:
            # Ranks of two worlds count their updates differently.
            self._num_retries += 1
            self._timer = self._loop.call_later(_RETRY_S, self._start)
            return
        self._num_retries = 0
        change, reason = self._waiting.popleft()
        if not self._is_settled():
            self._output.warn(f"the plan does not change ({reason}): the world has not settled")
            self._start()
            return
        self._number += 1
        self._round = _Round(self._number, change, reason, tuple(self._ranks()))
        self._tell({"number": self._number, "what": "prepare"})
        self._timer = self._loop.call_later(_ANSWER_S, self._give_up)

    def _give_up(self) -> None:
        current = self._round
        assert current is not None, "the timer stops with the round"
        silent = [rank for rank in current.ranks if rank not in current.ready]
        self.cancel(f"rank {join_numbers(silent)} did not answer; a change needs td.parallelize on every rank")

    def _commit(self, current: _Round) -> None:
        self._stop_timer()
        current.is_committed = True
        told = {"number": current.number, "what": "commit", "at": max(current.ready.values())}
        self._tell({**told, "change": current.change, "reason": current.reason})

    def _finish(self, current: _Round) -> None:
        """All ranks have changed, or refused alike."""
        word = next(iter(current.done.values()))
        if word.what == "changed":
            self._output.say(f"the plan changed after step {word.step}: {word.detail} ({current.reason})")
        else:
            self._output.warn(f"the plan stays {word.detail} ({current.reason})")
        self._next()

    def _next(self) -> None:
        self._round = None
        self._stop_timer()
        self._start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
