"""The gate: a change is told from noise by its interval, and from a busy machine by the rival beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from benchmarks.harness import Measurement, Row, Unit
from benchmarks.machine import Machine, describe_machine
from benchmarks.regression import COMMIT_TOLERANCE, COUNT_TOLERANCE, TOLERANCE, changes_between, lasting
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
    assert not any(one.is_worse(TOLERANCE) for one in lasting(lambda _: [(next(once), earlier)], ["c"]))
    always = measured(1.5, 1.5, 1.5)
    assert [one.is_worse(TOLERANCE) for one in lasting(lambda _: [(next(always), earlier)], ["c"])] == [True]


def test_a_row_without_a_rival_can_be_left_out(machine: Machine) -> None:
    rng = random.Random(7)
    pair = result(machine, rng, ours=2.0, has_rival=False), result(machine, rng, has_rival=False)
    assert [one.is_worse(TOLERANCE) for one in lasting(lambda _: [pair], ["c"])] == [True]
    assert lasting(lambda _: [pair], ["c"], needs_rival=True) == []


def counts(machine: Machine, collectives: float, calls: Sequence[float]) -> Result:
    rows = (
        Row(name="collectives", unit=Unit.COUNT, ours=Measurement.of([collectives])),
        Row(name="calls", unit=Unit.COUNT, ours=Measurement.of(calls)),
    )
    return Result(case="c", title="", about="", x_label="", budget="full", machine=machine, rows=rows)


def test_counts_are_compared_on_any_machine_and_held_closer(machine: Machine) -> None:
    earlier = counts(replace(machine, cpu="another", num_cores=999), 13, [757] * 5)
    same = changes_between(counts(machine, 13, [757, 757, 757, 759, 751]), earlier)
    assert [one.is_worse(TOLERANCE) or one.is_better(TOLERANCE) for one in same] == [False, False]
    more = changes_between(counts(machine, 14, [757 * (1 + 2 * COUNT_TOLERANCE)] * 5), earlier)
    assert [one.is_worse(COMMIT_TOLERANCE) for one in more] == [True, True]
    assert lasting(lambda _: [(counts(machine, 14, [757]), earlier)], ["c"], needs_rival=True)[0].is_worse(TOLERANCE)


def test_counts_of_another_torch_are_not_compared(machine: Machine) -> None:
    cpu, cuda, later = (replace(machine, torch=version) for version in ("2.13.0+cpu", "2.13.0+cu130", "2.14.0"))
    assert len(changes_between(counts(cuda, 3, [1]), counts(cpu, 3, [1]))) == 2
    assert changes_between(counts(later, 3, [1]), counts(cpu, 3, [1])) == []


def few(machine: Machine, rng: random.Random, case: str, *, ours: float = 1.0, noise: float = 0.3) -> Result:
    """A quick run on a restless machine: three samples of a side, each off by 30 %."""

    def three(center: float) -> Measurement:
        return Measurement.of([center * rng.lognormvariate(0, noise) for _ in range(3)])

    row = Row(name="work", unit=Unit.SECONDS, ours=three(ours), rivals={"rival": three(2.0)})
    return Result(case=case, title="", about="", x_label="", budget="quick", machine=machine, rows=(row,))


def test_unchanged_code_passes_the_gate_on_a_restless_machine(machine: Machine) -> None:
    """Quick runs of thirty rows, fifty times: none is found twice as slow in each of three."""
    rng, names = random.Random(8), [str(number) for number in range(30)]

    def pairs(wanted: Sequence[str]) -> list[tuple[Result, Result]]:
        return [(few(machine, rng, name), few(machine, rng, name)) for name in wanted]

    changes = [one for _ in range(50) for one in lasting(pairs, names, tolerance=COMMIT_TOLERANCE, needs_rival=True)]
    assert len(changes) == 1500
    assert not any(one.is_worse(COMMIT_TOLERANCE) for one in changes)


def test_code_that_takes_four_times_as_long_does_not_pass_the_gate(machine: Machine) -> None:
    rng, asked = random.Random(9), list[list[str]]()

    def pairs(wanted: Sequence[str]) -> list[tuple[Result, Result]]:
        asked.append(list(wanted))
        speeds = {"same": 1.0, "slow": 4.0}
        return [
            (few(machine, rng, name, ours=speeds[name], noise=0.1), few(machine, rng, name, noise=0.1))
            for name in wanted
        ]

    changes = lasting(pairs, ["same", "slow"], tolerance=COMMIT_TOLERANCE)
    assert {one.case: one.is_worse(COMMIT_TOLERANCE) for one in changes} == {"same": False, "slow": True}
    assert asked == [["same", "slow"], ["slow"], ["slow"]], "only what was worse is measured again"
