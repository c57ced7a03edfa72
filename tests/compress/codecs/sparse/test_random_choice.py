"""Elements drawn at random, alike on all ranks."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.world import World
from tests.compress.codecs.checks import (
    assert_linear,
    assert_mean_of_messages,
    assert_ranks_agree,
    assert_unbiased,
    average_all,
    gradient,
)
from tests.compress.examples import examples
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.sparse.random_choice import (
    BernoulliCodec,
    ScaledBernoulliCodec,
    acceptance,
    draw_each,
    draw_without_replacement,
)
from torsh_distributed.errors import CompressionError, InvalidArgument

CPU = torch.device("cpu")
NUM_DRAWS = 300


@examples
@given(st.integers(0, 2**32 - 1), st.integers(1, 5000), st.floats(0, 1))
def test_no_element_is_drawn_twice(seed: int, num_elements: int, share: float) -> None:
    count = round(share * num_elements)
    drawn = draw_without_replacement(seed, num_elements, count, CPU)
    assert drawn.numel() == drawn.unique().numel() == count
    assert count == 0 or 0 <= int(drawn.min()) <= int(drawn.max()) < num_elements
    assert torch.equal(drawn, draw_without_replacement(seed, num_elements, count, CPU))


def test_a_draw_of_all_is_a_permutation_across_pieces() -> None:
    drawn = draw_without_replacement(7, 150_000, 150_000, CPU)
    assert torch.equal(drawn.sort().values, torch.arange(150_000))
    assert not torch.equal(drawn, torch.arange(150_000))


def chi_squared(counts: torch.Tensor) -> float:
    expected = counts.double().mean()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(("num_elements", "count"), [(3, 1), (5, 2), (6, 3)])
def test_every_set_is_equally_likely(num_elements: int, count: int) -> None:
    sets = {chosen: i for i, chosen in enumerate(itertools.combinations(range(num_elements), count))}
    counts = torch.zeros(len(sets))
    for seed in range(NUM_DRAWS):
        drawn = draw_without_replacement(seed * 2654435761 % 2**32, num_elements, count, CPU)
        counts[sets[tuple(drawn.sort().values.tolist())]] += 1
    freedom = len(sets) - 1
    assert chi_squared(counts) < freedom + 5 * (2 * freedom) ** 0.5 + 5


def test_neighbouring_seeds_draw_differently() -> None:
    draws = torch.stack([draw_without_replacement(seed, 1000, 100, CPU) for seed in range(150)])
    counts = draws.flatten().bincount(minlength=1000)
    assert chi_squared(counts) < 999 + 5 * (2 * 999) ** 0.5
    common = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in itertools.pairwise(draws)) / 149
    assert common == pytest.approx(10, abs=1)


@examples
@given(st.sampled_from([1e-6, 0.01, 0.1, 0.5, 0.99]), st.integers(0, 100))
def test_each_element_is_drawn_with_its_probability(probability: float, seed: int) -> None:
    num_elements = 100_000
    drawn = draw_each(seed, num_elements, probability, CPU)
    spread = (num_elements * probability * (1 - probability)) ** 0.5
    assert abs(drawn.numel() - num_elements * probability) < 5 * spread + 5
    assert (drawn[1:] > drawn[:-1]).all()


def test_probability_one_draws_all() -> None:
    assert acceptance(1.0) == 2**32
    assert torch.equal(draw_each(3, 70_000, 1.0, CPU), torch.arange(70_000))
    assert draw_each(3, 0, 0.5, CPU).numel() == 0


def test_more_elements_than_can_be_drawn_from_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="smaller buckets"):
        draw_without_replacement(0, 2**31 + 1, 1, CPU)


SHARES = st.sampled_from([1e-6, 0.01, 0.1, 0.5, 1.0])


@examples
@given(st.integers(0, 3000), SHARES, st.integers(0, 1000))
def test_what_is_drawn_travels_as_it_is(numel: int, share: float, step: int) -> None:
    codec, key = BernoulliCodec(share), Key(step=step)
    x = gradient(numel, 0) + 10  # no element is 0
    payload = codec.encode(x, key)
    got = codec.decode(payload, numel, key)
    assert int((got != 0).sum()) == payload.numel()
    assert torch.equal(got, torch.where(got != 0, x, 0.0))


@examples
@given(st.integers(0, 500), SHARES, st.integers(0, 50))
def test_messages_add_up_to_the_message_of_the_sum(numel: int, share: float, step: int) -> None:
    assert_linear(BernoulliCodec(share), numel, Key(step=step))


def test_scaled_it_is_unbiased_and_raw_it_is_not() -> None:
    assert_unbiased(ScaledBernoulliCodec(0.2), gradient(40, 1))
    with pytest.raises(AssertionError):
        assert_unbiased(BernoulliCodec(0.2), gradient(40, 1))


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "gloo"), (4, "shm")])
def test_ranks_get_the_mean_of_all_messages(world: World, num_ranks: int, backend: str) -> None:
    sizes = [0, 1, 3, 5001]
    by_rank = world.run(average_all, partial(BernoulliCodec, 0.1), sizes, {}, num_ranks=num_ranks, backend=backend)
    assert_ranks_agree(by_rank)
    assert_mean_of_messages(by_rank)
    count = int((by_rank[0][-1].sent != 0).sum())
    assert by_rank[0][-1].num_bytes == 2 * (num_ranks - 1) * 4 * count // num_ranks


def test_bad_input_is_refused_and_a_plan_finds_it() -> None:
    with pytest.raises(InvalidArgument, match="share"):
        BernoulliCodec(1.1)
    codec = make_codec("bernoulli:0.5")
    assert isinstance(codec, BernoulliCodec)
    size = codec.encode(torch.ones(100), Key()).numel()
    with pytest.raises(CompressionError, match=f"{size} fp32 values"):
        codec.decode(torch.zeros(size + 1), 100, Key())
