from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torsh_distributed import events
from torsh_distributed.observe.job.energy_account import EnergyAccount
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.run_comparison import compare_runs
from torsh_distributed.observe.metrics.step_record import StepRecord


def step(number: int, end: float, step_s: float, *, samples: int = 4, wait_s: float | None = None) -> StepRecord:
    return StepRecord(number, end, step_s, None, None, None, wait_s, None, None, step_s, num_samples=samples)


def energy(end: float, joules: float, *, seconds: float = 1.0, node: int = 0, meter: str = "gpu 0", **facts: object):
    given: dict[str, object] = {"source": "nvml", "is_measured": True, "ranks": (0, 1), **facts}
    return events.EnergyEvent(time=end, node=node, meter=meter, joules=joules, duration_s=seconds, **given)  # type: ignore[arg-type]  # of a mapping


def test_an_interval_is_shared_over_the_steps_inside_it_by_their_time() -> None:
    account = EnergyAccount()
    for number, (end, length) in enumerate([(1.0, 0.25), (1.25, 0.25), (2.0, 0.75), (3.0, 1.0)], 1):
        account.take_step(step(number, end, length))
    for end, joules in ((1.0, 100.0), (2.0, 200.0), (3.0, 50.0)):
        account.take_energy(energy(end, joules))
    # The first step runs from 0.75 to 1: what is before it is the start.
    assert account.step_joules() == [(1, 25.0), (2, 50.0), (3, 150.0), (4, 50.0)]
    found = account.summary()
    assert found is not None
    assert (found.start_j, found.steps_j, found.other_j) == (75.0, 275.0, 0.0)
    assert found.joules_per_sample == pytest.approx(350 / 16)
    assert found.by_rank == {0: 175.0, 1: 175.0}
    assert found.idle_w == 50.0
    assert found.idle_j == 150.0
    assert found.peak_w == 200.0


def test_a_run_that_goes_on_a_day_later_was_not_idle_overnight() -> None:
    account = EnergyAccount()
    for end, joules in ((1.0, 100.0), (2.0, 50.0), (90_000.0, 80.0)):
        account.take_energy(energy(end, joules))
    found = account.summary()
    assert found is not None
    assert (found.idle_w, found.idle_j, found.total_j) == (50.0, 150.0, 230.0)


def test_damaged_numbers_are_in_no_sum() -> None:
    account = EnergyAccount()
    account.take_energy(energy(1.0, 100.0, g_per_kwh=360.0))
    for joules in (math.nan, math.inf, 1e300, -1.0):
        account.take_energy(energy(2.0, joules, g_per_kwh=360.0))
    for g_per_kwh in (math.nan, math.inf, -1.0):
        account.take_energy(energy(3.0, 100.0, g_per_kwh=g_per_kwh))
    found = account.summary()
    assert found is not None
    assert (found.total_j, found.grams, found.ungraded_j) == (400.0, pytest.approx(0.01), 300.0)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.floats(0.005, 3.0), min_size=2, max_size=60),
    joules=st.lists(st.floats(0.0, 900.0), min_size=1, max_size=40),
    failure=st.integers(0, 60),
)
def test_the_parts_add_up_to_what_the_meters_counted(lengths: list[float], joules: list[float], failure: int) -> None:
    account = EnergyAccount()
    end = 0.0
    for number, length in enumerate(lengths):
        end += length
        again = number - 3 if number > failure else number  # a failure undoes three steps
        account.take_step(step(again, end, length))
        if number == failure:
            account.take_failure(end + 1e-4)
    for at, one in enumerate(joules, 1):
        account.take_energy(energy(float(at), one))
        account.take_energy(energy(float(at), one / 2, node=1))
    found = account.summary()
    assert found is not None
    assert found.total_j == pytest.approx(1.5 * math.fsum(joules))
    parts = (found.steps_j, found.start_j, found.failures_j, found.undone_j, found.skipped_j, found.other_j)
    assert math.fsum(parts) == pytest.approx(found.total_j, rel=1e-9, abs=1e-6)
    assert math.fsum(one for _, one in account.step_joules()) == pytest.approx(found.steps_j, abs=1e-6)
    assert min(parts) >= -1e-6


def test_a_failure_costs_the_way_back_and_the_steps_that_are_done_again() -> None:
    account = EnergyAccount()
    for number in range(1, 5):
        account.take_step(step(number, float(number), 1.0))
    account.take_failure(4.5)
    # Restarted from the checkpoint of step 2, ten seconds later; the process's first step has its start in it.
    for number, end, length in ((3, 15.0, 6.0), (4, 16.0, 1.0), (5, 17.0, 1.0)):
        account.take_step(step(number, end, length))
    for end in range(1, 18):
        account.take_energy(energy(float(end), 10.0))
    found = account.summary()
    assert found is not None
    assert found.undone_j == pytest.approx(20.0)
    assert found.failures_j == pytest.approx(100.0)
    assert (found.num_steps, found.num_samples) == (5, 20)
    assert found.steps_j == pytest.approx(50.0)
    assert found.wasted_j == pytest.approx(120.0)


def test_one_kilowatt_for_an_hour_is_a_kilowatt_hour_and_400_grams_at_400() -> None:
    account = EnergyAccount()
    for second in range(1, 3601):
        account.take_energy(energy(float(second), 1000.0, g_per_kwh=400.0))
    found = account.summary()
    assert found is not None
    assert found.total_j / 3.6e6 == pytest.approx(1.0)
    assert found.grams == pytest.approx(400.0)
    assert found.mean_w == pytest.approx(1000.0)
    assert "1 kWh (measured)" in found.in_words()
    assert "400 g CO2" in found.in_words()


def test_without_an_intensity_there_are_no_grams_and_an_estimate_is_called_one() -> None:
    account = EnergyAccount()
    for second in range(1, 31):  # sums that round differently are no grams either
        account.take_energy(energy(float(second), 3.1 / second))
        account.take_energy(
            energy(float(second), 3.1 / second / 3, meter="processors", source="estimate", is_measured=False)
        )
    found = account.summary()
    assert found is not None
    assert found.grams is None
    assert found.label == "75% measured, rest estimated"
    assert "CO2" not in found.in_words()


def test_the_total_is_predicted_from_a_tenth_of_the_run_within_five_percent() -> None:
    account = EnergyAccount()
    for number in range(1, 101):
        account.take_step(step(number, number * 0.2, 0.2))
    for second in range(1, 21):
        account.take_energy(energy(float(second), 300.0 + 20 * math.sin(second)))
    early = account.summary(total_steps=1000)
    assert early is not None
    assert early.predicted_j == pytest.approx(200 * 300.0, rel=0.05)
    assert early.predicted_error_j is not None
    assert 0 < early.predicted_error_j < 0.05 * 200 * 300.0


def test_waiting_is_the_ranks_share_of_the_steps_time() -> None:
    account = EnergyAccount()
    for number in (1, 2, 3):
        for one in (step(number, float(number), 1.0, wait_s=0.5), step(number, float(number), 1.0, wait_s=0.1)):
            account.take_wait(one)
        account.take_step(step(number, float(number), 1.0))
    for second in (1, 2, 3):
        account.take_energy(energy(float(second), 100.0))
    found = account.summary()
    assert found is not None
    assert found.waiting_j == pytest.approx(0.3 * 300.0)


def test_a_view_takes_meters_and_two_runs_are_compared_by_joules() -> None:
    one, other = JobView(), JobView()
    for view, joules in ((one, 100.0), (other, 150.0)):
        view.take(events.to_record(energy(5.0, joules)))
        view.take({"type": "energy", "joules": "many"})
        assert view.num_dropped == 1
        assert view.job_values()["torsh_energy_joules", ("measured",)] == joules
    rows = {row.what: row for row in compare_runs(one, other)}
    assert rows["energy"].difference == "+50.0%"
