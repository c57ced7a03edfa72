"""The launcher's side of a change of the plan: all ranks take it before the same update, or none does.

One change at a time. Every rank is asked where it could stop and stays there until it hears again; the last of these
places is where all of them change. A rank that does not answer in time is a reason to change nothing.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torsh_distributed.launch.local.failure_report import LauncherOutput, join_numbers
from torsh_distributed.launch.local.loop import Loop, Timer

_ANSWER_S = 5.0
_HOLD_ANSWER_S = 60.0
"""Those that have answered wait for the others, which is what a hold wants; one may still build its model."""
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
    is_hold: bool = False
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
        self._waiting: deque[tuple[str, str, bool]] = deque()
        self._held: int | None = None
        """Number of the change that holds the ranks, or will as soon as they reach it."""
        self._round: _Round | None = None
        self._number = 0
        self._num_retries = 0
        self._timer: Timer | None = None
        self._is_closed = False

    def want(self, change: str, reason: str) -> None:
        """A rule asks for a change, as JSON; it follows those that were asked for before."""
        self._add(change, reason, is_hold=False)

    def hold(self, longest_s: float, reason: str) -> None:
        """All ranks stop before the same update until `release`, or that long; nothing if they do or are about to."""
        is_asked = any(is_hold for _, _, is_hold in self._waiting) or (self._round is not None and self._round.is_hold)
        if self._held is None and not is_asked and not self._is_closed:
            self._add(json.dumps({"hold_s": longest_s}), reason, is_hold=True)

    def release(self) -> bool:
        """End the hold, or give up one that is not agreed on yet; whether there was any."""
        was_asked = any(is_hold for _, _, is_hold in self._waiting)
        self._waiting = deque(one for one in self._waiting if not one[2])
        current = self._round
        if current is not None and current.is_hold and not current.is_committed:
            self.cancel("the job is to train again")
            was_asked = True
        if self._held is None:
            return was_asked
        self._tell({"number": self._held, "what": "release"})
        self._held = None
        return True

    def _add(self, change: str, reason: str, *, is_hold: bool) -> None:
        if self._is_closed or len(self._waiting) >= _MAX_WAITING:
            self._output.warn(f"the plan does not change ({reason}): too many changes wait, or the job ends")
            return
        self._waiting.append((change, reason, is_hold))
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
        change, reason, is_hold = self._waiting.popleft()
        if not self._is_settled():
            self._output.warn(f"the plan does not change ({reason}): the world has not settled")
            self._start()
            return
        self._number += 1
        self._round = _Round(self._number, change, reason, tuple(self._ranks()), is_hold)
        self._tell({"number": self._number, "what": "prepare"})
        self._timer = self._loop.call_later(_HOLD_ANSWER_S if is_hold else _ANSWER_S, self._give_up)

    def _give_up(self) -> None:
        current = self._round
        assert current is not None, "the timer stops with the round"
        silent = [rank for rank in current.ranks if rank not in current.ready]
        self.cancel(f"rank {join_numbers(silent)} did not answer; a change needs td.parallelize on every rank")

    def _commit(self, current: _Round) -> None:
        self._stop_timer()
        current.is_committed = True
        self._held = current.number if current.is_hold else self._held
        told = {"number": current.number, "what": "commit", "at": max(current.ready.values())}
        self._tell({**told, "change": current.change, "reason": current.reason})

    def _finish(self, current: _Round) -> None:
        """All ranks have changed, or refused alike."""
        word = next(iter(current.done.values()))
        if word.what == "changed" and current.is_hold:
            self._output.say(f"training holds after step {word.step} ({current.reason})")
        elif word.what == "changed":
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
