from __future__ import annotations

import random

import pytest

from torsh_distributed.observe.job.straggler_finder import StragglerFinder


@pytest.mark.parametrize("num_ranks", [2, 4, 64])
@pytest.mark.parametrize("noise", [0.02, 0.08])
def test_a_rank_30_percent_slower_is_named_within_five_steps_and_nobody_else(num_ranks: int, noise: float) -> None:
    random.seed(num_ranks)
    finder = StragglerFinder()

    def run(step: int, slow: float) -> None:
        for rank in range(num_ranks):
            busy_s = 0.02 * random.lognormvariate(0, noise) * (slow if rank == 1 else 1)
            finder.add(rank, step, busy_s, num_ranks=num_ranks)

    for step in range(1000):
        run(step, 1.0)
        assert finder.stragglers == [], f"named at step {step}, where all are equal"
    for step in range(1000, 1005):
        run(step, 1.3)
    if noise < 0.05:
        assert [one.rank for one in finder.stragglers] == [1]
        assert finder.stragglers[0].slowdown == pytest.approx(0.3, abs=0.1)
    for step in range(1005, 1015):
        run(step, 1.3)
    assert [one.rank for one in finder.stragglers] == [1]
    for step in range(1015, 1030):
        run(step, 1.0)
    assert finder.stragglers == [], "forgotten once it keeps up"


def test_one_slow_step_and_steps_that_are_not_whole_name_nobody() -> None:
    finder = StragglerFinder()
    for step in range(3000):
        finder.add(0, step, 0.02, num_ranks=2)
        if step % 3:
            finder.add(1, step, 0.2 if step == 100 else 0.02, num_ranks=2)
    assert finder.stragglers == []
    assert len(finder._waiting) <= 512


def test_ranks_may_tell_of_hundreds_of_steps_one_after_the_other() -> None:
    finder = StragglerFinder()
    for first in range(0, 1000, 200):
        for rank in range(4):
            for step in range(first, first + 200):
                finder.add(rank, step, 0.026 if rank == 2 and step >= 600 else 0.02, num_ranks=4)
    assert [(one.rank, one.since_step) for one in finder.stragglers] == [(2, 600)]


def test_a_world_of_one_has_no_stragglers() -> None:
    finder = StragglerFinder()
    for step in range(20):
        finder.add(0, step, 1.0, num_ranks=1)
    assert finder.stragglers == []


def heavy_tailed(source: random.Random) -> float:
    """A step of a noisy machine: some three per cent of scatter, and each 50th step is up to ten times as long."""
    spike = min(source.paretovariate(1.1), 10.0) if source.random() < 0.02 else 1.0
    return 0.02 * source.lognormvariate(0, 0.03) * spike


def busy_machine(source: random.Random, state: list[int]) -> float:
    """A core that another process uses now and then: for 1 to 12 steps they take about twice as long."""
    if state[0] == 0 and source.random() < 0.02:
        state[0] = source.randint(1, 12)
    state[0] = max(0, state[0] - 1)
    return 0.02 * source.lognormvariate(0, 0.03) * (source.uniform(1.6, 2.2) if state[0] else 1.0)


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
@pytest.mark.parametrize("seed", range(8))
def test_heavy_tails_name_nobody_and_hide_nobody(num_ranks: int, seed: int) -> None:
    source = random.Random(1000 * num_ranks + seed)
    finder = StragglerFinder()

    def run(step: int, slowdown: float) -> None:
        for rank in range(num_ranks):
            factor = slowdown if rank == num_ranks - 1 else 1.0
            finder.add(rank, step, factor * heavy_tailed(source), num_ranks=num_ranks)

    for step in range(1, 1001):
        run(step, 1.0)
    assert finder.take_newly_named() == []
    for step in range(1001, 1006):
        run(step, 1.3)
    (named,) = finder.take_newly_named()
    assert named.rank == num_ranks - 1
    assert 996 < named.since_step <= 1002
    assert named.named_step <= 1005


@pytest.mark.parametrize("seed", range(8))
def test_a_core_that_others_use_is_learned_and_a_slow_rank_on_it_still_found(seed: int) -> None:
    """Without the kernel's count of what others took, the first time may be named; what comes again is not."""
    source = random.Random(seed)
    finder = StragglerFinder()
    states = [[0], [0]]

    def run(step: int, slowdown: float) -> None:
        for rank in range(2):
            factor = slowdown if rank == 1 else 1.0
            finder.add(rank, step, factor * busy_machine(source, states[rank]), num_ranks=2)

    for step in range(1, 401):
        run(step, 1.0)
    finder.take_newly_named()
    for step in range(401, 1401):
        run(step, 1.0)
    assert len(finder.take_newly_named()) <= 1, "twenty times a core was busy"
    num_named = 0
    for step in range(1401, 1501):
        run(step, 1.3)
        num_named += 1 in {one.rank for one in finder.stragglers}
    assert num_named > 30
