"""Small trainings that a seed names: each has the losses of one process, or is refused as it was before.

`verdicts.txt` keeps what each case came to. Renew it with `python -m tests.right --record` and look at what changed: a
case that was equal and is refused now is a loss too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bed.world import World
from tests.right.case_runs import in_short, verdicts_here
from tests.right.training_case import PLANS, TrainingCase, draw_case

RECORD = Path(__file__).parent / "verdicts.txt"


def recorded() -> dict[int, str]:
    """The verdict of each fixed case, by its seed."""
    lines = RECORD.read_text(encoding="utf-8").splitlines()
    return {int(seed): verdict for seed, verdict in (line.split(" ", 1) for line in lines)}


def quick_seeds() -> list[int]:
    """The first training of each plan that is equal, and the first that is refused, among the first fifty."""
    first: dict[tuple[str, str], int] = {}
    for seed, verdict in sorted(recorded().items())[:50]:
        first.setdefault((draw_case(seed).plan, verdict.split(": ")[0]), seed)
    return sorted(first.values())


def by_num_ranks(seeds: list[int]) -> list[list[TrainingCase]]:
    """Cases that can share ranks, a handful at a time."""
    cases = [draw_case(seed) for seed in seeds]
    groups = []
    for num_ranks in sorted({count for count, _ in PLANS.values()}):
        alike = [case for case in cases if case.num_ranks == num_ranks]
        groups += [alike[start : start + 6] for start in range(0, len(alike), 6)]
    return groups


def check(world: World, cases: list[TrainingCase]) -> None:
    expected = recorded()
    found = world.run(verdicts_here, cases, num_ranks=cases[0].num_ranks, backend="torsh", timeout_s=100)
    for case, *verdicts in zip(cases, *found, strict=True):
        for verdict in verdicts:
            assert verdict.split(": ")[0] in ("equal", "refused"), f"{case}\n{verdict}"
            assert in_short(verdict) == expected[case.seed], f"{case}\n{verdict}"


def _name(cases: list[TrainingCase]) -> str:
    return f"{cases[0].num_ranks} ranks, {cases[0].seed} to {cases[-1].seed}"


@pytest.mark.parametrize("cases", by_num_ranks(quick_seeds()), ids=_name)
def test_losses_are_those_of_one_process(world: World, cases: list[TrainingCase]) -> None:
    check(world, cases)


@pytest.mark.matrix
@pytest.mark.parametrize("cases", by_num_ranks(sorted(set(recorded()) - set(quick_seeds()))), ids=_name)
def test_losses_of_further_trainings_are_those_of_one_process(world: World, cases: list[TrainingCase]) -> None:
    check(world, cases)


def test_experts_may_be_in_one_stage_alone(world: World) -> None:
    case = TrainingCase(plan="dp × pp", model="experts", loss="sum and count", padding="lonely", accumulation=2)
    assert world.run(verdicts_here, [case], num_ranks=4, backend="torsh", timeout_s=60) == [["equal"]] * 4


def test_the_record_has_no_case_that_differs() -> None:
    record = recorded()
    assert len(record) >= 300
    assert all(verdict.split(": ")[0] in ("equal", "refused") for verdict in record.values())
    num_equal = sum(verdict == "equal" for verdict in record.values())
    assert num_equal >= 0.5 * len(record), "most of what people write must run"
