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
