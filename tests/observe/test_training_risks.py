"""Risks of courses whose truth is known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.training_curve import CurvePoint, EvaluationPoint
from torsh_distributed.observe.training_risks import RiskThresholds, training_risks

Course = Callable[[int], float]
NUM_STEPS = 400


def fall(step: int) -> float:
    return 1.5 + 4.0 * step**-0.4


def run(
    loss: Course = fall, *, validation: Course | None = None, norm: Course | None = None, rate: Course | None = None
) -> JobView:
    """Four hundred steps that scatter by half a percent, evaluated every 25."""
    view, source = JobView(), random.Random(0)
    for step in range(1, NUM_STEPS + 1):
        noisy, moment = loss(step) * (1 + source.gauss(0, 0.005)), 1000.0 + step
        norm_now = None if norm is None else norm(step) * math.exp(source.gauss(0, 0.2))
        view.curve.add(CurvePoint(step, moment, noisy, 1.0, None, norm_now, None if rate is None else rate(step)))
        if validation is not None and step % 25 == 0:
            view.evaluations.add(EvaluationPoint(step, moment, validation(step)))
    return view


def turning(step: int) -> float:
    """A validation loss that is lowest at step 200 and 10 % above that at the end."""
    return fall(200) * (1 + 0.1 * abs(step - 200) / 200)


def test_a_validation_loss_that_turns_while_the_training_loss_falls_is_overfitting() -> None:
    found = training_risks(run(validation=turning)).overfitting
    assert found is not None
    assert (found.verdict, found.best_step) == ("overfitting", 200)
    assert found.rise == pytest.approx(0.1)
    assert found.training_change == pytest.approx(fall(400) / fall(200) - 1, abs=0.02)
    assert found.gap == pytest.approx(turning(400) - fall(400), abs=0.05)
    tolerant = training_risks(run(validation=turning), RiskThresholds(overfitting_rise=0.2)).overfitting
    assert tolerant is not None
    assert tolerant.verdict == "none"


def test_a_validation_loss_that_follows_or_rises_with_the_training_loss_is_not() -> None:
    for loss, validation, verdict in (
        (fall, lambda step: fall(step) + 0.2, "none"),
        (fall, lambda step: fall(step) * (1.05 if step == 400 else 1.0), "none"),  # a single one is chance
        (lambda step: 2.0 + step / 400, lambda step: 2.1 + step / 400, "both rise"),
    ):
        found = training_risks(run(loss, validation=validation)).overfitting
        assert found is not None
        assert found.verdict == verdict


def test_gradients_are_calm_growing_or_exploding() -> None:
    for norm, verdict in (
        (lambda step: 1.0, "calm"),
        (lambda step: 3.0 * step**-0.3, "calm"),
        (lambda step: 2.0 ** max(0.0, (step - 200) / 60), "growing"),
        (lambda step: 1.0 if step < 380 else 40.0, "exploding"),
    ):
        found = training_risks(run(norm=norm)).gradients
        assert found is not None
        assert found.verdict == verdict, found
        if verdict == "growing":
            assert found.doubling_steps == pytest.approx(60, rel=0.1)
    patient = training_risks(run(norm=norm), RiskThresholds(gradient_factor=1e9)).gradients
    assert patient is not None
    assert (patient.verdict, patient.num_spikes) == ("calm", 0)


def test_what_the_learning_rate_still_does() -> None:
    for loss, rate, verdict in (
        (lambda step: 4.0 - step / 200, lambda step: 0.1, "effective"),
        (lambda step: 2.0, lambda step: 0.1, "no effect"),
        (lambda step: 2.0, lambda step: 0.1 if step < 200 else 0.001, "spent"),
        (lambda step: 2.0 + (0.01 * max(0, step - 300)), lambda step: 0.1, "too high"),
    ):
        found = training_risks(run(loss, rate=rate)).learning_rate
        assert found is not None
        assert found.verdict == verdict, found
    steady = training_risks(run(lambda step: 4.0 - step / 200, rate=lambda step: 0.1)).learning_rate
    assert steady is not None
    assert steady.change_per_1000_steps == pytest.approx(-5.0, rel=0.05)
    assert steady.fall_per_rate == pytest.approx(0.05, rel=0.05)
    assert steady.earlier_fall_per_rate == pytest.approx(0.05, rel=0.05)
    untouched = RiskThresholds(spent_rate=0.001)
    strict = training_risks(run(lambda step: 2.0, rate=lambda step: 0.1 if step < 200 else 0.001), untouched)
    assert strict.learning_rate is not None
    assert strict.learning_rate.verdict == "no effect"


def test_what_was_not_recorded_is_not_judged() -> None:
    found = training_risks(run())
    assert (found.overfitting, found.gradients, found.learning_rate) == (None, None, None)
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    with pytest.raises(InvalidArgument, match="gradient_factor must be a number from 1 on"):
        RiskThresholds(gradient_factor=0.5)
