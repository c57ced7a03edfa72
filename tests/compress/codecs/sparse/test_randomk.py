"""RandomK, raw and scaled."""

from __future__ import annotations

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
    through,
)
from tests.compress.examples import examples
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.sparse.random_choice import RandomKCodec, ScaledRandomKCodec
from torsh_distributed.compress.codecs.sparse.selection import share_of
from torsh_distributed.errors import CompressionError, InvalidArgument

SHARES = st.sampled_from([1e-6, 0.01, 0.1, 0.5, 1.0])
SIZES = [0, 1, 3, 5001]


@examples
@given(st.integers(0, 3000), SHARES, st.integers(0, 1000))
def test_exactly_k_elements_travel_as_they_are(numel: int, share: float, step: int) -> None:
    codec, key = RandomKCodec(share), Key(step=step)
    x = gradient(numel, 0) + 10  # no element is 0
    payload = codec.encode(x, key)
    assert payload.numel() * 4 == codec.payload_bytes(numel) == 4 * share_of(share, numel)
    got = codec.decode(payload, numel, key)
    assert int((got != 0).sum()) == share_of(share, numel)
    assert torch.equal(got, torch.where(got != 0, x, 0.0))


@examples
@given(st.integers(0, 500), SHARES, st.integers(0, 50))
def test_messages_add_up_to_the_message_of_the_sum(numel: int, share: float, step: int) -> None:
    assert_linear(RandomKCodec(share), numel, Key(step=step))


def test_scaled_it_is_unbiased_and_raw_it_is_not() -> None:
    assert_unbiased(ScaledRandomKCodec(0.2), gradient(40, 1))
    with pytest.raises(AssertionError):
        assert_unbiased(RandomKCodec(0.2), gradient(40, 1))


def test_on_average_its_share_of_the_energy_arrives() -> None:
    x = gradient(50, 1)
    arrived = sum(float(through(RandomKCodec(0.1), x, Key(step=step)).square().sum()) for step in range(200)) / 200
    assert arrived == pytest.approx(0.1 * float(x.square().sum()), rel=0.4)


def test_ranks_draw_alike_and_steps_and_streams_do_not() -> None:
    codec = RandomKCodec(0.1)
    x = torch.arange(1.0, 1001.0)
    first = codec.encode(x, Key(step=1, stream=1, rank=0))
    assert torch.equal(first, codec.encode(x, Key(step=1, stream=1, rank=3)))
    for other in (Key(step=2, stream=1), Key(step=1, stream=2), Key(seed=1, step=1, stream=1)):
        assert not torch.equal(first.sort().values, codec.encode(x, other).sort().values)


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "gloo"), (3, "shm"), (4, "gloo")])
def test_ranks_get_the_mean_of_all_messages(world: World, num_ranks: int, backend: str) -> None:
    by_rank = world.run(average_all, partial(RandomKCodec, 0.1), SIZES, {}, num_ranks=num_ranks, backend=backend)
    assert_ranks_agree(by_rank)
    assert_mean_of_messages(by_rank)
    for numel, outcomes in zip(SIZES, zip(*by_rank, strict=True), strict=True):
        size = RandomKCodec(0.1).payload_bytes(numel)
        assert all(outcome.num_bytes == 2 * (num_ranks - 1) * size // num_ranks for outcome in outcomes)


def test_bad_input_is_refused_and_a_plan_finds_it() -> None:
    with pytest.raises(InvalidArgument, match="share"):
        RandomKCodec(0.0)
    codec = make_codec("randomk:0.5")
    assert isinstance(codec, RandomKCodec)
    with pytest.raises(CompressionError, match="5 fp32 values"):
        codec.decode(torch.zeros(4), 10, Key())
    with pytest.raises(CompressionError, match="5 fp32 values"):
        codec.decode(torch.zeros(5, dtype=torch.float16), 10, Key())
