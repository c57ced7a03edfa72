"""What a running job should do now, from what it has shown and the newest forecast."""

from __future__ import annotations

from typing import Any

import pytest

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.green.carbon.intensity import Intensity, IntensitySeries
from torsh_distributed.green.schedule.carbon_policy import CarbonPolicy, PolicyDecision
from torsh_distributed.plan import GreenConfig

_HOUR = 3600.0


def hours(*values: float, shares: tuple[float, ...] = ()) -> IntensitySeries:
    return IntensitySeries(
        Intensity(value, at * _HOUR, (at + 1) * _HOUR, "average", "forecast", "t", "T", shares[at] if shares else None)
        for at, value in enumerate(values)
    )


def policy(*, deadline: str = "10h", max_workers: int = 2, **green: Any) -> CarbonPolicy:
    config = GreenConfig(
        **{"carbon": "file", "carbon_file": "x", "strategy": "minimize_carbon", "deadline": deadline, **green}
    )
    return CarbonPolicy(config, min_workers=1, max_workers=max_workers, now=0.0)


def shown(found: CarbonPolicy, *, hours_left: float, workers: int = 2, idle_w: float = 10.0) -> CarbonPolicy:
    """A job of ten-second steps with `hours_left` of them at the speed of these workers, that draws 1 kW."""
    found.speed.total_steps = 1000 + round(hours_left * 360)
    for _ in range(3):
        found.speed.take_step(step=1000, step_s=10.0, workers=workers)
    found.speed.take_power(idle_w, workers=0)
    found.speed.take_power(1000.0, workers=workers)
    return found


def decide(found: CarbonPolicy, series: IntensitySeries, now: float = 0.0) -> PolicyDecision:
    found.decide(series, now=now)
    return found.decide(series, now=now)


def test_a_job_trains_until_its_first_steps_say_how_long_it_takes_then_holds_for_cleaner_hours() -> None:
    grid, job = hours(500, 500, 50, 50, 500, 500, 500, 500, 500, 500), policy()
    assert decide(job, grid).action == "train"
    found = decide(shown(job, hours_left=1.0), grid)
    assert (found.action, found.workers, found.resumes_at) == ("hold", 0, 2 * _HOUR)
    # Nobody ends the hold: it ends in time for the deadline, with what is spared for slower steps.
    assert 8.8 * _HOUR < found.longest_s < 9 * _HOUR
    assert found.reason == "500 g/kWh now, 50 in 2.0 h"
    # The second worker adds 0.9 of the first: two clean hours take one worker most of the way.
    assert decide(job, grid, now=2.1 * _HOUR).workers in (1, 2)
    assert decide(job, grid, now=9.0 * _HOUR).action == "train"
    assert decide(job, grid, now=9.5 * _HOUR).reason == "the deadline cannot be kept"


def test_fewer_workers_where_a_little_cleaner_is_not_worth_the_second_one() -> None:
    # With 0.5 of the speed a second worker at 300 g costs as much as one worker at 600 g.
    job = shown(policy(deadline="4h", worker_efficiency=0.5), hours_left=2.4)
    found = decide(job, hours(300, 300, 320, 310))
    assert (found.action, found.workers) == ("reduce", 1)


def test_one_noisy_answer_changes_nothing() -> None:
    job = shown(policy(), hours_left=1.0)
    dirty, clean = hours(500, 500, 50, *[500] * 7), hours(40, *[500] * 9)
    assert decide(job, dirty).action == "hold"
    assert job.decide(clean, now=0.0).action == "hold"
    assert job.decide(dirty, now=0.0).action == "hold"
    assert decide(job, clean).workers > 0


def test_machines_that_draw_nearly_as_much_when_they_wait_do_not_wait() -> None:
    found = decide(shown(policy(), hours_left=1.0, idle_w=950.0), hours(300, 300, 250, *[300] * 7))
    assert found.action == "train"


def test_a_job_that_has_not_begun_is_deferred_by_the_hours_that_the_user_gave() -> None:
    found = decide(policy(work_hours=2.0), hours(500, 500, 500, 50, 50, *[500] * 5))
    assert (found.action, found.workers, found.resumes_at) == ("defer", 0, 3 * _HOUR)


def test_no_forecast_is_no_reason_to_wait() -> None:
    found = decide(shown(policy(), hours_left=1.0), IntensitySeries(()))
    assert found.action == "train"
    assert "no forecast" in found.reason


def test_renewable_shares_decide_by_the_thresholds_of_the_plan() -> None:
    job = shown(policy(strategy="maximize_renewable", max_workers=4), hours_left=1.0, workers=4)
    grid = hours(*[300] * 10, shares=(0.1, 0.3, 0.6, *[0.1] * 7))
    found = [decide(job, grid, now=at * _HOUR) for at in (0, 1, 2)]
    assert [(one.action, one.workers) for one in found] == [("hold", 0), ("reduce", 2), ("train", 4)]
    assert decide(job, grid, now=8.97 * _HOUR).workers == 4, "the deadline leaves no time to wait"
    assert decide(job, hours(*[300] * 10)).reason == "the feed tells no renewable share"


def test_the_fewest_joules_are_those_of_the_workers_that_work_best_together() -> None:
    def chosen(idle_w: float, deadline: str = "10h") -> int:
        job = policy(strategy="minimize_energy", carbon="none", carbon_file=None, deadline=deadline)
        return decide(shown(job, hours_left=2.0, idle_w=idle_w), IntensitySeries(())).workers

    assert chosen(1.0) == 1, "the second adds 0.9 of the speed for the same power"
    assert chosen(900.0) == 2, "the one that waits draws nearly as much"
    assert chosen(1.0, deadline="3h") == 2, "one alone would be late"


def test_balanced_takes_both_signals_and_says_where_one_is_missing() -> None:
    job = shown(policy(strategy="balanced"), hours_left=1.0)
    # The fourth hour has a little more CO2 than the first, and far more renewables.
    grid = hours(200, 300, 300, 220, *[400] * 6, shares=(0.1, 0.1, 0.1, 0.9, *[0.1] * 6))
    assert decide(job, grid).resumes_at == 3 * _HOUR
    assert "CO2 alone decides" in decide(job, hours(200, *[400] * 9)).reason


def test_the_first_deadline_and_what_was_measured_outlive_the_launcher() -> None:
    first = shown(policy(), hours_left=1.0)
    config = GreenConfig(carbon="gb", strategy="minimize_carbon", deadline="10h")
    again = CarbonPolicy(config, min_workers=1, max_workers=2, now=5 * _HOUR, kept=first.to_dict())
    assert again.until == 10 * _HOUR
    assert again.speed.rates == {2: pytest.approx(0.1)}
    other = CarbonPolicy(
        config.replace(deadline="20h"), min_workers=1, max_workers=2, now=5 * _HOUR, kept=first.to_dict()
    )
    assert other.until == 25 * _HOUR
    with pytest.raises(InvalidArgument, match="deadline is in the past"):
        policy(deadline="1969-12-31T00:00Z")


def test_what_a_strategy_needs_is_said_before_the_run() -> None:
    for values, match in (
        ({"strategy": "balanced", "carbon": "gb"}, "needs green.deadline"),
        ({"strategy": "minimize_carbon", "deadline": "9h"}, "values change with time"),
        ({"deadline": "9h"}, "no effect without green.strategy"),
        ({"strategy": "balanced", "carbon": "gb", "deadline": "9h", "renewable_hold": 0.9}, "at most"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            GreenConfig(**values)
