"""Bernoulli, raw and scaled."""

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
)
from tests.compress.examples import examples
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.sparse.bernoulli import BernoulliCodec, ScaledBernoulliCodec
from torsh_distributed.errors import CompressionError, InvalidArgument

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
