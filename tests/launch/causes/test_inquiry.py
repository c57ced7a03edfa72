from __future__ import annotations

import time
from collections.abc import Callable

from tests.launch.causes.test_cause_finder import consequence, ended, own_failure
from tests.launch.causes.test_waits import steps, waiting
from torsh_distributed.launch.causes.inquiry import Inquiry
from torsh_distributed.launch.causes.waits import WaitFinding
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.worker.rank_status import RankStatus


class Case:
    """An inquiry whose ranks answer with what the test says."""

    def __init__(self, *answers: RankStatus) -> None:
        self.loop = Loop()
        self.answers = {status.rank: status for status in answers}
        self.num_asked = 0
        self.verdicts: list[EndReport] = []
        self.notices: list[WaitFinding] = []
        self.inquiry = Inquiry(
            self.loop, 3, ask=self._ask, on_verdict=self._take_verdict, on_notice=self.notices.append
        )

    def _ask(self) -> None:
        self.num_asked += 1
        for status in self.answers.values():
            self.loop.call_later(0, lambda status=status: self.inquiry.said(status, is_asked=True))

    def _take_verdict(self, failure: EndReport) -> None:
        self.verdicts.append(failure)
        self.loop.stop(0)

    def run(self, *, limit_s: float = 10.0, then: Callable[[], None] = lambda: None) -> float:
        start_s = time.monotonic()
        self.loop.call_later(limit_s, lambda: self.loop.stop(1))
        self.loop.call_later(0, then)
        self.loop.run()
        return time.monotonic() - start_s


def busy(rank: int) -> RankStatus:
    return RankStatus(rank=rank, groups={"0": steps(8)})


def stuck(rank: int) -> RankStatus:
    return RankStatus(rank=rank, waiting=waiting(9), groups={"0": steps(9)})


def test_a_cause_is_told_as_soon_as_the_others_have_answered() -> None:
    case = Case(stuck(0), stuck(2))
    case.inquiry.failed(own_failure(1, at_s=1))
    assert case.run() < 5
    (verdict,) = case.verdicts
    assert verdict.rank == 1
    assert verdict.consequences == ("ranks 0 and 2 waited in all_reduce #9",)


def test_a_consequence_waits_for_its_cause() -> None:
    case = Case()
    case.inquiry.failed(consequence(0, at_s=1, peers=(1,)))
    case.loop.call_later(0.3, lambda: case.inquiry.failed(own_failure(1, at_s=2)))
    case.run()
    (verdict,) = case.verdicts
    assert verdict.rank == 1


def test_a_consequence_without_a_cause_is_told_in_the_end() -> None:
    case = Case()
    case.inquiry.failed(consequence(0, at_s=1))
    assert case.run() >= 1.4
    assert [verdict.rank for verdict in case.verdicts] == [0]


def test_ranks_that_wait_for_one_that_ended_fail_the_job() -> None:
    case = Case(stuck(0), stuck(2))
    case.inquiry.said(busy(1), is_asked=False)
    case.inquiry.ended(ended(1, step=4))
    case.run()
    (verdict,) = case.verdicts
    assert verdict.cause == "ended normally after 4 steps while ranks 0 and 2 waited in all_reduce #9"
    assert verdict.exit_code == 1
    assert case.num_asked >= 2, "a wait counts if it is seen twice"


def test_ranks_that_go_on_after_one_ended_are_left_alone() -> None:
    case = Case(busy(0), busy(2))
    case.inquiry.said(busy(1), is_asked=False)
    case.inquiry.ended(ended(1))
    case.run(limit_s=1.0)
    assert case.verdicts == []
    assert case.num_asked >= 2


def test_a_long_wait_is_told_once() -> None:
    case = Case(stuck(0), stuck(2), busy(1))
    for _ in range(3):
        case.loop.call_later(0.05, lambda: case.inquiry.said(stuck(0), is_asked=False))
    case.run(limit_s=0.5)
    (notice,) = case.notices
    assert (notice.kind, notice.rank) == ("late", 1)
    assert case.verdicts == []


def test_nothing_is_said_after_the_end() -> None:
    case = Case()
    case.inquiry.failed(consequence(0, at_s=1))
    case.inquiry.close()
    case.inquiry.failed(own_failure(1, at_s=1))
    case.run(limit_s=0.3)
    assert case.verdicts == []


def test_a_rank_that_stops_beating_is_told_though_nobody_waits_for_it() -> None:
    silent = RankStatus(rank=1, silence="it does not answer: it is stopped (SIGSTOP or Ctrl-Z)", groups={"0": steps(8)})
    case = Case(busy(0), busy(2), silent)
    for _ in range(2):
        case.loop.call_later(0.05, lambda: case.inquiry.said(silent, is_asked=False))
    case.run(limit_s=0.5)
    (notice,) = case.notices
    assert notice.rank == 1
    assert notice.text.startswith("rank 1 gives no sign of life: it does not answer: it is stopped")
    assert "kill -CONT" in (notice.likely or "")
    assert case.verdicts == []


def test_a_rank_that_stopped_beating_and_answers_again_is_no_news() -> None:
    case = Case(busy(0), busy(2), busy(1))
    case.inquiry.said(RankStatus(rank=1, silence="it does not answer"), is_asked=False)
    case.run(limit_s=0.5)
    assert case.num_asked == 1
    assert case.notices == []
