"""The inquiry into one attempt: it collects what ranks say, asks the others, waits briefly for the cause, then speaks.

An error that only says a peer is gone often arrives before the peer's own. So a first failure that is a consequence is
not the verdict: the launcher waits, at most `_CONSEQUENCE_WAIT_S`, for what it points to.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial

from torsh_distributed.launch.causes.cause_finder import CauseFinder
from torsh_distributed.launch.causes.diagnosis import Diagnosis, diagnose
from torsh_distributed.launch.causes.likely_cause import likely_cause
from torsh_distributed.launch.causes.waits import WaitFinding, is_decided_by_end
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.loop import Loop, Timer
from torsh_distributed.launch.worker.rank_status import RankStatus

_ANSWER_WAIT_S = 0.2
_CONSEQUENCE_WAIT_S = 1.5
_STATUS_WAIT_S = 0.8
_FIRST_NOTICE_S = 2.0
_LAST_NOTICE_S = 120.0
_TOGETHER_NOTICE_S = 20.0
_END_LOOKS_S = (0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0, 8.0)


class Inquiry:
    """Runs at the leader, one for each attempt. Calls `on_verdict` at most once, and `on_notice` for long waits."""

    def __init__(
        self,
        loop: Loop,
        num_ranks: int,
        *,
        ask: Callable[[], None],
        on_verdict: Callable[[EndReport], None],
        on_notice: Callable[[WaitFinding], None],
    ) -> None:
        self._loop = loop
        self._ask = ask
        self._on_verdict = on_verdict
        self._on_notice = on_notice
        self._finder = CauseFinder(num_ranks)
        self._timers: list[Timer] = []
        self._is_over = False
        self._failed_s: float | None = None
        self._answered: set[int] = set()
        self._purpose: Callable[[], None] | None = None
        self._num_questions = 0
        self._num_end_looks = 0
        self._notice_limit_s = _FIRST_NOTICE_S
        self._silent: set[int] = set()
        self._noticed: set[tuple[str | None, str, int | None]] = set()

    def failed(self, failure: EndReport) -> None:
        """A rank failed."""
        if self._is_over or failure.rank is None:
            return
        self._finder.failures.setdefault(failure.rank, failure)
        if self._failed_s is None:
            self._failed_s = time.monotonic()
            self._question(self._judge)
            self._later(_ANSWER_WAIT_S, self._judge)
            self._later(_CONSEQUENCE_WAIT_S, self._judge)
        self._judge()

    def ended(self, failure: EndReport) -> None:
        """A rank ended with exit code 0."""
        if self._is_over or failure.rank is None:
            return
        self._finder.ended[failure.rank] = failure
        self._note_end()

    def _note_end(self) -> None:
        if self._failed_s is not None:
            self._judge()
        elif self._finder.running and self._num_end_looks == 0:
            self._look_after_end()

    def said(self, status: RankStatus, *, is_asked: bool) -> None:
        """A rank says what it does."""
        if self._is_over:
            return
        self._finder.note_status(status)
        if status.has_finished:
            self._note_end()
        elif is_asked:
            self._answered.add(status.rank)
            if self._purpose is not None and self._answered >= self._finder.running:
                self._answer()
        elif status.waiting is not None and self._failed_s is None:
            self._consider_notice(status)
        elif status.silence is not None and self._failed_s is None and status.rank not in self._silent:
            self._silent.add(status.rank)
            if self._purpose is None:
                self._question(partial(self._notice_silence, status.rank))

    def _question(self, purpose: Callable[[], None]) -> None:
        """Ask every rank what it does; `purpose` is called when all that run have answered, or after a while."""
        self._answered = set()
        self._purpose = purpose
        self._num_questions += 1
        number = self._num_questions
        self._ask()
        self._later(_STATUS_WAIT_S, lambda: self._answer() if number == self._num_questions else None)

    def _answer(self) -> None:
        purpose, self._purpose = self._purpose, None
        if purpose is not None and not self._is_over:
            purpose()

    # The doctor, on demand

    def diagnose(self, tell: Callable[[Diagnosis], None]) -> None:
        """Ask every rank what it does now, and tell what that means; a question that is under way is answered too."""
        if self._is_over:
            tell(Diagnosis(is_stuck=False, text="The job is about to end."))
            return
        pending = self._purpose

        def answer() -> None:
            if pending is not None:
                pending()
            finder = self._finder
            statuses = finder.waiting_statuses()
            tell(diagnose(statuses, finder.finished, num_ranks=finder.num_ranks, leaving=finder.leaving))

        self._question(answer)

    # The verdict on a failure

    def _judge(self) -> None:
        if self._is_over or self._failed_s is None:
            return
        finder = self._finder
        waited_s = time.monotonic() - self._failed_s + 0.001  # timers may fire a moment early
        is_heard = waited_s >= _ANSWER_WAIT_S or self._answered >= finder.running
        is_clear = finder.primary() is not None or finder.is_explained_by_end()
        is_everyone_down = not finder.running
        if (is_clear and is_heard) or is_everyone_down or waited_s >= _CONSEQUENCE_WAIT_S:
            if self._finder.primary() is None:
                finder.explain()
            self._speak()

    def _speak(self) -> None:
        verdict = self._finder.verdict()
        self.close()
        self._on_verdict(verdict)

    # A rank that ended while others wait for it

    def _look_after_end(self, before: tuple[str | None, int | None] | None = None) -> None:
        if self._num_end_looks < len(_END_LOOKS_S):
            delay_s = _END_LOOKS_S[self._num_end_looks]
            self._num_end_looks += 1
            self._later(delay_s, lambda: self._question(lambda: self._decide_on_end(before)))

    def _decide_on_end(self, before: tuple[str | None, int | None] | None) -> None:
        if self._failed_s is not None or not self._finder.running:
            return
        found = self._finder.explain()
        if found is None or not is_decided_by_end(found, self._finder.finished):
            self._look_after_end()
        elif found.is_certain_with == before:
            # Seen twice: they wait for a rank that can never come.
            self._speak()
        else:
            self._look_after_end(found.is_certain_with)

    # Waits that are not silent

    def _consider_notice(self, status: RankStatus) -> None:
        call = status.waiting
        if call is None or self._purpose is not None:
            return
        if self._finder.finished and self._num_end_looks >= len(_END_LOOKS_S):
            self._num_end_looks = len(_END_LOOKS_S) - 2
            self._look_after_end()
        if call.age_s >= self._notice_limit_s * 0.99 and (call.group, call.op, call.sequence) not in self._noticed:
            self._question(self._notice)

    def _notice(self) -> None:
        if self._failed_s is not None:
            return
        found = self._finder.explain()
        if found is None or found.call is None:
            return
        cause = likely_cause(found, self._finder.statuses, self._finder.finished)
        if found.kind == "together" and found.call.age_s < _TOGETHER_NOTICE_S and cause.kind != "link":
            return  # everyone has come: it is slow, or the network is
        key = (found.call.group, found.call.op, found.call.sequence)
        if key in self._noticed:
            return
        for status in self._finder.statuses.values():
            if status.waiting is not None:
                self._noticed.add((status.waiting.group, status.waiting.op, status.waiting.sequence))
        self._noticed.add(key)
        self._notice_limit_s = min(2 * self._notice_limit_s, _LAST_NOTICE_S)
        self._on_notice(dataclasses.replace(found, likely=cause.line))

    # A rank that gives no sign of life

    def _notice_silence(self, rank: int) -> None:
        """Nobody may wait for it yet; if somebody does, the wait is explained instead."""
        status = self._finder.statuses.get(rank)
        if self._failed_s is not None or status is None or status.silence is None or rank in self._finder.finished:
            return
        found = self._finder.explain()
        if found is not None and found.call is not None and found.call.age_s >= _FIRST_NOTICE_S:
            self._notice()
            return
        text = f"rank {rank} gives no sign of life: {status.silence}" + ("; it is at:" if status.stack else "")
        silent = WaitFinding(kind="late", rank=rank, waiting=(), call=None, text=text, stack=status.stack)
        cause = likely_cause(silent, self._finder.statuses, self._finder.finished)
        self._on_notice(dataclasses.replace(silent, likely=cause.line))

    def _later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(delay_s, lambda: None if self._is_over else callback()))

    def close(self) -> None:
        """End the inquiry; nothing is called afterwards."""
        self._is_over = True
        for timer in self._timers:
            timer.cancel()
        self._timers = []
