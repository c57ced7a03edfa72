"""Threshold."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.world import World
from tests.compress.codecs.checks import (
    assert_contracts,
    assert_ranks_agree,
    average_all,
    gradient,
    through,
    travelling,
)
from tests.compress.examples import examples
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.sparse.magnitude import GaussianCodec, ThresholdCodec
from torsh_distributed.compress.messages.sparse import sparse_bytes
from torsh_distributed.errors import InvalidArgument

KEY = Key()
SIZES = [0, 1, 3, 20_001]


@examples
@given(st.integers(0, 2000), st.floats(0, 3), st.integers(0, 5))
def test_what_reaches_the_threshold_travels_and_nothing_else(numel: int, threshold: float, seed: int) -> None:
    codec = ThresholdCodec(threshold, dtype=torch.float32)
    x = gradient(numel, seed)
    payload = codec.encode(x, KEY)
    reaches = x.abs() >= threshold
    assert torch.equal(codec.decode(payload, numel, KEY), torch.where(reaches, x, 0.0))
    assert payload.numel() == sparse_bytes(numel, int(reaches.sum()), torch.float32)


def test_it_may_send_nothing() -> None:
    codec = ThresholdCodec(5.0)
    payload = codec.encode(torch.full((1000,), 4.9), KEY)
    assert payload.numel() == 8
    assert not codec.decode(payload, 1000, KEY).any()


def test_at_threshold_zero_everything_travels_without_indices() -> None:
    codec = ThresholdCodec(0.0)
    x = torch.tensor([0.0, 1.0, -2.0])
    payload = codec.encode(x, KEY)
    assert payload.numel() == 8 + 2 * 3
    assert torch.equal(codec.decode(payload, 3, KEY), x)


@examples
@given(st.floats(0.01, 3), st.integers(0, 5))
def test_no_element_left_out_reaches_the_threshold(threshold: float, seed: int) -> None:
    x = gradient(1000, seed)
    left_out = (x - through(ThresholdCodec(threshold), x, KEY)).abs()
    assert left_out.max() < threshold + 2**-11 * x.abs().max()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_that_select_differently_many_agree(world: World, num_ranks: int) -> None:
    by_rank = world.run(average_all, partial(ThresholdCodec, 1.5), SIZES, {}, num_ranks=num_ranks, backend="shm")
    assert_ranks_agree(by_rank)
    counts = {int((outcomes[-1].message != 0).sum()) for outcomes in by_rank}
    assert len(counts) > 1
    total = torch.stack([outcomes[-1].message for outcomes in by_rank]).sum(dim=0) / num_ranks
    mean = by_rank[0][-1].mean
    kept = mean != 0
    torch.testing.assert_close(mean[kept], total[kept], rtol=2**-10, atol=1e-7)
    if num_ranks <= 3:
        assert torch.equal(kept, total != 0)
        size = max(sparse_bytes(SIZES[-1], count, torch.float16) for count in counts)
        assert all(outcomes[-1].num_bytes == (num_ranks - 1) * (travelling(size) + 8) for outcomes in by_rank)


def test_bad_thresholds_are_refused_and_a_plan_finds_it() -> None:
    for threshold in (-1.0, float("nan"), 1e31):
        with pytest.raises(InvalidArgument, match="magnitude"):
            ThresholdCodec(threshold)
    codec = make_codec("threshold:0.5")
    assert isinstance(codec, ThresholdCodec)
    assert codec.threshold == 0.5


def num_sent(codec: GaussianCodec, x: torch.Tensor) -> int:
    return codec.select(x, KEY).numel()


def test_of_a_normal_gradient_travels_what_lies_beyond() -> None:
    torch.manual_seed(0)
    x = torch.randn(100_000)
    codec = GaussianCodec(2.0)
    beyond = x.abs() >= 2.0 * x.square().mean().sqrt()
    assert torch.equal(codec.select(x, KEY), beyond.nonzero().squeeze(1))
    assert num_sent(codec, x) == pytest.approx(4550, rel=0.05)


@pytest.mark.parametrize("power", [5.0, 8.0])
def test_heavy_tails_do_not_starve_it(power: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(100_000)
    x = x.sign() * x.abs() ** power
    plain = int((x.abs() >= 2.0 * x.square().mean().sqrt()).sum())
    assert plain < 4550 / 1.5
    codec = GaussianCodec(2.0)
    assert num_sent(codec, x) == 4550
    assert x[codec.select(x, KEY)].abs().min() >= x.abs().kthvalue(100_000 - 4550).values


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1.0, 1e20, 1e37])
def test_the_scale_of_a_gradient_does_not_matter(size: float) -> None:
    torch.manual_seed(0)
    assert num_sent(GaussianCodec(2.0), torch.randn(10_000) * size) == pytest.approx(455, rel=0.3)


def test_constant_and_zero_gradients_send_their_share() -> None:
    for x in (torch.zeros(1000), torch.full((1000,), 3.0)):
        assert num_sent(GaussianCodec(2.0), x) == 46
        assert torch.equal(through(GaussianCodec(2.0), x, KEY)[:46], x[:46])
    assert num_sent(GaussianCodec(2.0), torch.ones(1)) == 1
    assert num_sent(GaussianCodec(2.0), torch.ones(0)) == 0


@examples
@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=50), st.floats(0, 4))
def test_it_contracts_as_stated(values: list[float], deviations: float) -> None:
    assert_contracts(GaussianCodec(deviations), torch.tensor(values), KEY)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_agree(world: World, num_ranks: int) -> None:
    sizes = [0, 1, 3, 20_001]
    by_rank = world.run(average_all, partial(GaussianCodec, 2.0), sizes, {}, num_ranks=num_ranks, backend="gloo")
    assert_ranks_agree(by_rank)
    if num_ranks == 2:
        for outcomes in zip(*by_rank, strict=True):
            total = outcomes[0].message + outcomes[1].message
            torch.testing.assert_close(outcomes[0].mean, total / 2)


def test_bad_deviations_are_refused_and_a_plan_finds_it() -> None:
    for deviations in (-1.0, 11.0, float("nan")):
        with pytest.raises(InvalidArgument, match="deviations"):
            GaussianCodec(deviations)
    codec = make_codec("gaussian:3")
    assert isinstance(codec, GaussianCodec)
    assert codec.share == pytest.approx(0.0027, abs=1e-4)
