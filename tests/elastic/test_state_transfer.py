"""Who gives the state, and whether an interrupted step can be finished, from what all ranks tell."""

from __future__ import annotations

from torsh_distributed.elastic.state_transfer import RankProgress, source_of, sources_of


def test_the_source_is_the_farthest_of_those_that_were_there() -> None:
    ranks = [RankProgress(num_updates=7), RankProgress(num_updates=8), RankProgress(num_updates=8, is_new=True)]
    assert source_of(ranks) == 1


def test_a_step_is_kept_only_if_all_have_kept_the_same_one() -> None:
    first = RankProgress(num_updates=7, averaged=[0])
    assert sources_of([first, RankProgress(num_updates=7, averaged=[0, 1])]) == {0: 0, 1: 1}
    assert sources_of([first, RankProgress(num_updates=7, averaged=[])]) == {0: 0}
    assert sources_of([first, RankProgress(num_updates=7)]) is None
    assert sources_of([first, RankProgress(num_updates=8, averaged=[])]) is None
