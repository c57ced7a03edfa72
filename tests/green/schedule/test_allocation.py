from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.green.carbon.intensity import Intensity, IntensitySeries
from torsh_distributed.green.schedule.allocation import JobShape, TimeSlot, WorkerSchedule, allocate, run_now
from torsh_distributed.green.schedule.forecast import slots_ahead

_HOUR = 3600.0


def hours(*values: float) -> list[TimeSlot]:
    return [TimeSlot(at * _HOUR, (at + 1) * _HOUR, value) for at, value in enumerate(values)]


def test_a_job_waits_for_the_cleanest_hours_and_says_what_that_saves() -> None:
    slots = hours(400, 300, 100, 100, 500)
    plan, now = allocate(JobShape(work_h=2.0), slots), run_now(JobShape(work_h=2.0), slots)
    assert plan.windows == [(2 * _HOUR, 4 * _HOUR, 1)]
    assert (plan.grams, now.grams) == (200.0, 700.0)
    assert (plan.done_at, now.done_at) == (4 * _HOUR, 2 * _HOUR)


def test_waiting_machines_draw_idle_power_which_is_counted() -> None:
    plan = allocate(JobShape(work_h=1.0, idle_w=200.0), hours(400, 100))
    assert plan.grams == pytest.approx(0.2 * 400 + 1.0 * 100)
    assert run_now(JobShape(work_h=1.0, idle_w=200.0), hours(400, 100)).grams == 400.0


def test_work_that_does_not_fit_is_not_called_done() -> None:
    assert allocate(JobShape(work_h=3.0), hours(1, 2)).done_at is None
    with pytest.raises(InvalidArgument):
        JobShape(work_h=1.0, speeds=(1.0, 2.5))


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.integers(1, 600), min_size=2, max_size=6),
    work=st.integers(1, 8),
    gain=st.sampled_from([0.5, 0.8, 1.0]),
)
def test_no_other_allocation_of_whole_hours_emits_less(values: list[int], work: int, gain: float) -> None:
    slots, job = hours(*values), JobShape(work_h=float(work), speeds=(1.0, 1.0 + gain))
    plan = allocate(job, slots)
    speed = (0.0, 1.0, 1.0 + gain)
    others = [
        sum(workers * value for workers, value in zip(chosen, values, strict=True))
        for chosen in itertools.product((0, 1, 2), repeat=len(values))
        if sum(speed[workers] for workers in chosen) >= work - 1e-9
    ]
    if not others:
        assert plan.done_at is None
        return
    # The greedy rule is exact up to the one slot that is needed in part: that one costs at most its whole.
    assert plan.done_at is not None
    assert plan.grams <= min(others) + max(values) + 1e-6
    assert _work(plan, speed) == pytest.approx(work, abs=1.0 + gain)
    assert _work(plan, speed) >= work - 1e-6


def _work(plan: WorkerSchedule, speed: tuple[float, ...]) -> float:
    return sum(speed[one.workers] * one.share * one.slot.hours for one in plan.slots)


def test_beyond_the_forecast_the_day_before_stands_in_and_nothing_is_made_up() -> None:
    day = [
        Intensity(100.0 + hour, hour * _HOUR, (hour + 1) * _HOUR, "average", "forecast", "gb", "GB")
        for hour in range(24)
    ]
    slots, known_until = slots_ahead(IntensitySeries(day), now=0.0, until=30 * _HOUR)
    assert known_until == 24 * _HOUR
    assert len(slots) == 30
    assert [slots[at].g_per_kwh for at in (0, 23, 24, 29)] == [100.0, 123.0, 100.0, 105.0]
    # From the middle of an hour on, the first slot ends with that hour.
    assert [slot.hours for slot in slots_ahead(IntensitySeries(day), now=0.75 * _HOUR, until=3 * _HOUR)[0]] == [
        0.25,
        1,
        1,
    ]
    with pytest.raises(InvalidArgument, match="knows neither"):
        slots_ahead(IntensitySeries(day[:5]), now=0.0, until=10 * _HOUR)
    with pytest.raises(InvalidArgument, match="in the past"):
        slots_ahead(IntensitySeries(day), now=100.0, until=50.0)
