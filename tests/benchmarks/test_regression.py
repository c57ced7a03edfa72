"""The gate: a change is told from noise by its interval, and from a busy machine by the rival beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.harness import Measurement, Row, Unit
from benchmarks.machine import Machine, describe_machine
from benchmarks.regression import TOLERANCE, changes_between, lasting
from benchmarks.result import Result


@pytest.fixture(scope="module")
def machine() -> Machine:
    return describe_machine()


def samples(rng: random.Random, center: float, noise: float) -> Measurement:
    return Measurement.of([center * rng.lognormvariate(0, noise) for _ in range(15)])


def result(
    machine: Machine, rng: random.Random, *, ours: float = 1.0, load: float = 1.0, noise: float = 0.05,
    unit: Unit = Unit.SECONDS, has_rival: bool = True,
) -> Result:  # fmt: skip
    """One row: ours takes `ours`, its rival 2, both `load` times longer than on an idle machine."""
    rivals = {"rival": samples(rng, 2.0 * load, noise)} if has_rival else {}
    row = Row(name="work", unit=unit, ours=samples(rng, ours * load, noise), rivals=rivals)
    return Result(case="c", title="", about="", x_label="", budget="full", machine=machine, rows=(row,))


def test_noise_and_a_busier_machine_are_no_change(machine: Machine) -> None:
    rng, worse = random.Random(1), 0
    for _ in range(300):
        now = result(machine, rng, load=rng.uniform(0.5, 3.0))
        [change] = changes_between(now, result(machine, rng))
        worse += change.is_worse(TOLERANCE) or change.is_better(TOLERANCE)
    assert worse == 0


def test_a_change_beyond_the_tolerance_is_found_on_a_busier_machine(machine: Machine) -> None:
    rng = random.Random(2)
    slower = [changes_between(result(machine, rng, ours=1.4, load=2.0), result(machine, rng))[0] for _ in range(100)]
    assert sum(one.is_worse(TOLERANCE) for one in slower) >= 99
    faster = [changes_between(result(machine, rng, ours=0.7, load=2.0), result(machine, rng))[0] for _ in range(100)]
    assert sum(one.is_better(TOLERANCE) for one in faster) >= 99


def test_the_interval_holds_the_true_factor(machine: Machine) -> None:
    rng, held = random.Random(3), 0
    for _ in range(400):
        [change] = changes_between(result(machine, rng, ours=1.25), result(machine, rng))
        held += change.low <= 1 / 1.25 <= change.high
    assert held >= 380, "99 % of 400, with room for the percentiles of 15 samples"


def test_a_rate_that_rises_is_better(machine: Machine) -> None:
    rng = random.Random(4)
    rate = Unit.PER_SECOND
    [change] = changes_between(result(machine, rng, ours=2.0, unit=rate), result(machine, rng, unit=rate))
    assert change.is_better(TOLERANCE)


def test_without_a_rival_only_like_machines_are_compared(machine: Machine) -> None:
    rng = random.Random(5)
    now = result(machine, rng, ours=2.0, has_rival=False)
    [change] = changes_between(now, result(machine, rng, has_rival=False))
    assert change.is_worse(TOLERANCE)
    other = replace(machine, cpu="another")
    assert changes_between(now, result(other, rng, has_rival=False)) == []


def test_what_is_worse_once_is_measured_again_and_what_stays_worse_remains(machine: Machine) -> None:
    rng = random.Random(6)
    earlier = result(machine, rng)

    def measured(*speeds: float) -> Iterator[Result]:
        return iter([result(machine, rng, ours=speed) for speed in speeds])

    once = measured(1.5, 1.0)
    assert not any(one.is_worse(TOLERANCE) for one in lasting(lambda: next(once), earlier))
    always = measured(1.5, 1.5, 1.5)
    assert [one.is_worse(TOLERANCE) for one in lasting(lambda: next(always), earlier)] == [True]
