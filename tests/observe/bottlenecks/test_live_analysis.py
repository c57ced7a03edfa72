"""Why a job is slow while it runs: steps of which most were not looked at."""

from __future__ import annotations

import pytest

from torsh_distributed.observe.bottlenecks.live_analysis import analyse_live
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.metrics.step_record import StepRecord, pack_steps


def step(number: int, *, is_looked_at: bool) -> StepRecord:
    """A step of 100 ms: 50 forward and backward, 20 optimizer, 20 waiting, 10 other."""
    parts = (0.02, 0.03, 0.02) if is_looked_at else (None, None, None)
    other_s = 0.01 if is_looked_at else 0.08
    return StepRecord(number, 1000.0 + 0.1 * number, 0.1, *parts, 0.02, None, None, other_s)


def test_parts_of_steps_that_were_not_looked_at_are_those_of_the_others() -> None:
    view = JobView()
    view.take({"type": "job", "world_size": 2})
    steps = [step(number, is_looked_at=number % 32 == 0) for number in range(2, 66)]
    for rank in range(2):
        view.take({"type": "metrics", "rank": rank, "sequence": 1, "steps": pack_steps(steps)})
    found = analyse_live(view)
    assert found is not None
    assert found.parts["optimizer"] == pytest.approx(0.02, rel=0.01)
    assert found.parts["compute"] == pytest.approx(0.06, rel=0.02), "with what is neither, where forward is not seen"
    assert sum(found.parts.values()) == pytest.approx(0.1)
