"""A view is entered only if every rank has voted for it, and the mean of the losses is what it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.world import World
from torsh_distributed.elastic.epoch_world import MeanAndVotes, is_unanimous


@given(votes=st.lists(st.integers(0, 10**6), min_size=1, max_size=64), epoch=st.integers(1, 10**6))
def test_only_the_same_vote_of_every_rank_counts(votes: list[int], epoch: int) -> None:
    sums = [float(sum(votes)), float(sum(vote**2 for vote in votes))]
    assert is_unanimous(sums, epoch, len(votes)) == (set(votes) == {epoch})


def test_votes_that_add_up_are_not_unanimous() -> None:
    assert not is_unanimous([3.0, 5.0], 1, 3), "0, 1 and 2"


def collect(votes: list[int]) -> tuple[float, bool]:
    rank = dist.get_rank()
    found: list[bool] = []
    number = MeanAndVotes(
        torch.tensor(float(rank + 1)), votes[rank], lambda _, sums: found.append(is_unanimous(sums, 1, len(votes)))
    )
    return number.wait(), found[0]


@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["gloo", "torsh"])
@pytest.mark.parametrize(("votes", "agree"), [([1, 1, 1], True), ([0, 1, 2], False), ([1, 1, 0], False)])
def test_three_ranks_vote_with_their_losses(world: World, backend: str, votes: list[int], agree: bool) -> None:
    for mean, has_agreed in world.run(collect, votes, num_ranks=3, backend=backend):
        assert mean == pytest.approx(2.0)
        assert has_agreed == agree
