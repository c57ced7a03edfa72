"""TopK."""

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
from torsh_distributed.compress.codecs.sparse.magnitude import TopKCodec
from torsh_distributed.compress.codecs.sparse.selection import share_of
from torsh_distributed.errors import CompressionError, InvalidArgument

KEY = Key()
SHARES = st.sampled_from([1e-6, 0.001, 0.01, 0.1, 0.37, 0.9, 1.0])
SIZES = [0, 1, 3, 700, 20_001]


@examples
@given(st.integers(0, 3000), SHARES, st.integers(0, 5))
def test_exactly_the_k_largest_travel_with_their_signs(numel: int, share: float, seed: int) -> None:
    x = gradient(numel, seed)
    got = through(TopKCodec(share), x, KEY)
    expected = torch.zeros(numel)
    kept = x.abs().topk(share_of(share, numel)).indices
    expected[kept] = x[kept]
    torch.testing.assert_close(got, expected, rtol=2**-11, atol=1e-9)
    assert (got * expected >= 0).all()


@examples
@given(st.integers(0, 5000), SHARES, st.sampled_from([torch.float16, torch.float32]))
def test_the_payload_has_the_bytes_that_payload_bytes_says(numel: int, share: float, dtype: torch.dtype) -> None:
    codec = TopKCodec(share, dtype=dtype)
    assert codec.encode(gradient(numel, 0), KEY).numel() == codec.payload_bytes(numel)


def test_one_percent_takes_less_than_25_bits_for_each_element_sent() -> None:
    assert TopKCodec(0.01).payload_bytes(8_400_000) * 8 / 84_000 < 25


@examples
@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=50), SHARES)
def test_it_contracts_as_stated(values: list[float], share: float) -> None:
    assert_contracts(TopKCodec(share), torch.tensor(values), KEY)


def test_the_stated_contraction_is_tight() -> None:
    codec = TopKCodec(0.25)
    x = torch.ones(64)
    error = (through(codec, x, KEY) - x).square().sum() / x.square().sum()
    assert float(error) == pytest.approx(1 - 0.25)
    assert codec.contraction(64) == pytest.approx(0.25)


@pytest.mark.parametrize("x", [torch.zeros(100), torch.full((100,), -3.0), torch.tensor([7.0])])
def test_constant_gradients_are_no_special_case(x: torch.Tensor) -> None:
    got = through(TopKCodec(0.1), x, KEY)
    count = share_of(0.1, x.numel())
    assert torch.equal(got[:count], x[:count])
    assert not got[count:].any()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_few_ranks_get_the_mean_of_all_messages(world: World, num_ranks: int, backend: str) -> None:
    by_rank = world.run(average_all, partial(TopKCodec, 0.05), SIZES, {}, num_ranks=num_ranks, backend=backend)
    assert_ranks_agree(by_rank)
    for numel, outcomes in zip(SIZES, zip(*by_rank, strict=True), strict=True):
        messages = torch.stack([outcome.message for outcome in outcomes])
        # Rounding: thirds are added up, not a sum divided by three.
        torch.testing.assert_close(outcomes[0].mean, messages.sum(dim=0) / num_ranks, rtol=1e-5, atol=1e-7)
        size = travelling(TopKCodec(0.05).payload_bytes(numel))
        for outcome in outcomes:
            assert torch.equal(outcome.sent, outcome.message)
            assert outcome.num_bytes == (num_ranks - 1) * size


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_many_ranks_lose_nothing_that_nobody_accounts_for(world: World, backend: str) -> None:
    num_ranks = 4
    by_rank = world.run(average_all, partial(TopKCodec, 0.05), SIZES, {}, num_ranks=num_ranks, backend=backend)
    assert_ranks_agree(by_rank)
    for numel, outcomes in zip(SIZES, zip(*by_rank, strict=True), strict=True):
        # The sums that are kept are those of the messages, rounded once more.
        total = torch.stack([outcome.message for outcome in outcomes]).sum(dim=0) / num_ranks
        mean = outcomes[0].mean
        kept = mean != 0
        torch.testing.assert_close(mean[kept], total[kept], rtol=2**-10, atol=1e-7)
        count = share_of(0.05, numel)
        assert min(count, 1) <= int(kept.sum()) <= count + num_ranks
        if count > 100:  # the larger ones: more than half of what all messages hold
            assert mean.square().sum() > 0.5 * total.square().sum()
            words = 6 * count * (num_ranks - 1) / num_ranks
            assert all(outcome.num_bytes < 4 * words for outcome in outcomes)


def test_the_volume_for_a_rank_does_not_grow_with_the_world(world: World) -> None:
    sent = {}
    for num_ranks in (4, 6):
        by_rank = world.run(average_all, partial(TopKCodec, 0.01), [200_000], {}, num_ranks=num_ranks, backend="shm")
        sent[num_ranks] = max(outcomes[0].num_bytes for outcomes in by_rank) * num_ranks / (num_ranks - 1)
    assert sent[6] == pytest.approx(sent[4], rel=0.05)
    assert sent[4] == pytest.approx(2 * TopKCodec(0.01).payload_bytes(200_000), rel=0.05)


def test_without_error_feedback_it_diverges_where_error_feedback_converges() -> None:
    """Three quadratics whose largest gradients point away from the common minimum."""
    centres = torch.tensor([[-3.0, 2.0, 2.0], [2.0, -3.0, 2.0], [2.0, 2.0, -3.0]])
    codec = TopKCodec(1 / 3, dtype=torch.float32)

    def gradients(x: torch.Tensor) -> torch.Tensor:
        return 2 * centres * (centres @ x).unsqueeze(1) + x / 2  # of (a·x)² + |x|²/4, minimum at 0

    plain, fed_back = torch.ones(3), torch.ones(3)
    residuals = torch.zeros(3, 3)
    for _ in range(200):
        plain = plain - 0.05 * torch.stack([through(codec, g, KEY) for g in gradients(plain)]).mean(dim=0)
        wanted = gradients(fed_back) + residuals
        sent = torch.stack([through(codec, g, KEY) for g in wanted])
        residuals = wanted - sent
        fed_back = fed_back - 0.01 * sent.mean(dim=0)
    assert plain.norm() > 1000
    assert fed_back.norm() < 0.5


def test_bad_shares_and_types_are_refused() -> None:
    for share in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(InvalidArgument, match="share"):
            TopKCodec(share)
    with pytest.raises(InvalidArgument, match="fp16 or fp32"):
        TopKCodec(0.1, dtype=torch.bfloat16)


def test_a_payload_of_another_size_is_refused() -> None:
    payload = TopKCodec(0.1).encode(gradient(100, 0), KEY)
    with pytest.raises(CompressionError):
        TopKCodec(0.1).decode(payload, 50, KEY)


def test_a_plan_finds_it() -> None:
    codec = make_codec("topk:0.02")
    assert isinstance(codec, TopKCodec)
    assert codec.share == 0.02
