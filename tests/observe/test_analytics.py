"""Courses whose end is known, seen in part."""

from __future__ import annotations

import random

import pytest

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.analytics import fit_power_law, forecast_loss, training_course
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.training_curve import CurvePoint


def course(num_steps: int, loss_at, *, noise: float = 0.0, seed: int = 0, step_s: float = 0.5) -> JobView:  # type: ignore[no-untyped-def]
    view, source = JobView(), random.Random(seed)
    view.header.started = 1000.0
    for step in range(1, num_steps + 1):
        loss = loss_at(step) * (1 + source.gauss(0, noise))
        view.curve.add(CurvePoint(step, 1000 + step * step_s, loss, step_s, 8 / step_s))
    return view


def power_law(step: int) -> float:
    return 1.5 + 4.0 * step**-0.4


def test_a_power_law_without_noise_is_found_again() -> None:
    law = fit_power_law([(float(step), power_law(step)) for step in range(10, 2000, 20)])
    assert law is not None
    assert law.at(5000) == pytest.approx(power_law(5000), rel=0.01)


@pytest.mark.slow
def test_the_interval_holds_the_true_step_for_most_runs() -> None:
    true_step = (4.0 / (1.7 - 1.5)) ** (1 / 0.4)  # 1789
    num_right = 0
    for seed in range(10):
        found = forecast_loss(course(900, power_law, noise=0.02, seed=seed), target_loss=1.7, cost_per_hour=7200.0)
        assert found.step is not None, found
        assert found.left_s is not None
        assert found.cost is not None
        assert found.cost.value == pytest.approx(2 * found.left_s.value)
        assert found.left_s.value == pytest.approx((found.step.value - 900) * 0.5, rel=1e-6)
        num_right += found.step.low <= true_step <= found.step.high
    assert num_right >= 7, "a 90 % interval, on ten runs"


def test_what_cannot_be_told_is_absent_with_its_reason() -> None:
    view = course(900, power_law, noise=0.01)
    assert "floor" in forecast_loss(view, target_loss=0.5).reason
    assert forecast_loss(view, target_loss=1.51).step is None, "decades of steps away"
    assert forecast_loss(view, target_loss=2.0).reached_step == pytest.approx(182, abs=60)
    flat = forecast_loss(course(300, lambda step: 2.0, noise=0.01), target_loss=1.0)
    assert flat.step is None
    assert flat.reason
    with pytest.raises(InvalidArgument, match="at least 60 steps"):
        forecast_loss(course(20, power_law), target_loss=1.0)


def test_the_course_so_far_is_judged_with_its_errors() -> None:
    good = training_course(course(600, power_law, noise=0.005))
    assert good.convergence is not None
    assert good.convergence.trend == "improving"
    truth = 1000 * (power_law(600) - power_law(300)) / 300
    assert good.convergence.change_per_1000_steps == pytest.approx(truth, rel=0.25)
    assert good.stability is not None
    assert good.stability.scatter == pytest.approx(0.005, rel=0.5)
    assert good.stability.num_spikes == 0
    assert good.efficiency is not None
    assert good.efficiency.goodput == pytest.approx(1.0)
    assert good.efficiency.samples_per_s == pytest.approx(16.0)
    assert good.efficiency.mfu is None
    trends = {
        name: training_course(course(400, loss_at, noise=0.01)).convergence.trend  # type: ignore[union-attr]
        for name, loss_at in {"flat": lambda step: 2.0, "rising": lambda step: 1.0 + step / 400}.items()
    }
    assert trends == {"flat": "flat", "rising": "rising"}
    spiky = training_course(course(400, lambda step: 9.0 if step in (100, 250) else 2.0, noise=0.01))
    assert spiky.stability is not None
    assert spiky.stability.num_spikes == 2
    nothing = training_course(JobView())
    assert (nothing.convergence, nothing.stability, nothing.efficiency) == (None, None, None)
