"""Samplers: every index once, at every world size, also when the world changes in mid-epoch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.train.sampler import DistributedSampler, DistributedSamplerWrapper


def samplers(size: int, num_ranks: int, **options: object) -> list[DistributedSampler]:
    return [
        DistributedSampler(range(size), num_replicas=num_ranks, rank=rank, **options)  # type: ignore[arg-type]
        for rank in range(num_ranks)
    ]


@given(st.integers(0, 60), st.integers(1, 7), st.booleans(), st.integers(0, 5))
def test_shares_are_disjoint_and_cover_the_epoch(size: int, num_ranks: int, shuffle: bool, epoch: int) -> None:
    group = samplers(size, num_ranks, shuffle=shuffle)
    for sampler in group:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in group]
    assert sorted(itertools.chain(*shares)) == list(range(size))
    assert [len(share) for share in shares] == [len(sampler) for sampler in group]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_even_shares_are_those_of_torchs_sampler(rounds: int, num_ranks: int, epoch: int, shuffle: bool) -> None:
    data = range(rounds * num_ranks)
    for rank, ours in enumerate(samplers(len(data), num_ranks, seed=7, shuffle=shuffle)):
        theirs = TorchSampler(data, num_ranks, rank, shuffle=shuffle, seed=7)  # type: ignore[arg-type]
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)


@given(
    size=st.integers(1, 80),
    worlds=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=5),
    last=st.integers(1, 6),
)
def test_no_index_is_lost_or_repeated_when_the_world_changes(
    size: int, worlds: list[tuple[int, int]], last: int
) -> None:
    """Some rounds in each world, then the rest of the epoch in the last one."""
    seen: list[int] = []
    state = None
    for num_ranks, rounds in [*worlds, (last, size)]:
        group = samplers(size, num_ranks, seed=3)
        states = []
        for sampler in group:
            if state is not None:
                sampler.load_state_dict(state)
            seen += itertools.islice(sampler, rounds)
            states.append(sampler.state_dict())
        state = states[0]
    assert sorted(seen) == list(range(size))


@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 4), st.integers(1, 6))
def test_dropping_the_end_gives_all_ranks_equally_many(size: int, num_ranks: int, rounds: int, later: int) -> None:
    group = samplers(size, num_ranks, drop_last=True)
    rounds = min(rounds, len(group[0]))
    head = [list(itertools.islice(sampler, rounds)) for sampler in group]
    rest = samplers(size, later, drop_last=True)
    for sampler in rest:
        sampler.load_state_dict(group[0].state_dict())
    tail = [list(sampler) for sampler in rest]
    assert {len(share) for share in tail} == {len(rest[0])} == {(size - rounds * num_ranks) // later}
    everything = list(itertools.chain(*head, *tail))
    assert len(everything) == len(set(everything))


def test_what_was_fetched_ahead_is_not_counted_as_trained_on() -> None:
    [sampler, other] = samplers(20, 2, shuffle=False)
    assert list(itertools.islice(sampler, 6)) == [0, 2, 4, 6, 8, 10]
    assert sampler.state_dict(num_taken=4)["place"] == 8
    other.load_state_dict(sampler.state_dict(num_taken=4))
    assert next(iter(other)) == 9
    with pytest.raises(InvalidArgument, match="num_taken=7, handed_out=6"):
        sampler.state_dict(num_taken=7)


def test_a_loader_stopped_between_batches_goes_on_there() -> None:
    [sampler] = samplers(10, 1, shuffle=True)
    loader = DataLoader(range(10), batch_size=3, sampler=sampler)  # type: ignore[arg-type]
    first = next(iter(loader)).tolist()
    [resumed] = samplers(10, 1, shuffle=True)
    resumed.load_state_dict(sampler.state_dict())
    rest = [batch.tolist() for batch in DataLoader(range(10), batch_size=3, sampler=resumed)]  # type: ignore[arg-type]
    assert [first, *rest] == [batch.tolist() for batch in loader]
    resumed.set_epoch(1)
    assert sorted(resumed) == list(range(10)), "the next epoch is whole"


class Weighted(Sampler[int]):
    """Draws again for every epoch, the same on every rank."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 11

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.multinomial(torch.arange(1.0, 30.0), 11, generator=generator).tolist())


def test_a_sampler_of_ones_own_is_shared_out_and_taken_up_again() -> None:
    def wrapped(rank: int, num_ranks: int) -> DistributedSamplerWrapper:
        return DistributedSamplerWrapper(Weighted(), num_replicas=num_ranks, rank=rank)

    whole = Weighted()
    whole.set_epoch(4)
    two = [wrapped(rank, 2) for rank in range(2)]
    for sampler in two:
        sampler.set_epoch(4)
    head = [list(itertools.islice(sampler, 2)) for sampler in two]
    three = [wrapped(rank, 3) for rank in range(3)]
    for sampler in three:
        sampler.load_state_dict(two[1].state_dict())
    drawn = [*head[0], *head[1], *itertools.chain(*three)]
    assert sorted(drawn) == sorted(whole)


def test_mistakes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="rank=2, num_replicas=2"):
        DistributedSampler(range(3), num_replicas=2, rank=2)
    [sampler] = samplers(5, 1)
    with pytest.raises(InvalidArgument, match=r"another size(?s:.*)state=6, sampler=5"):
        sampler.load_state_dict({"epoch": 0, "place": 0, "seed": 0, "size": 6})
