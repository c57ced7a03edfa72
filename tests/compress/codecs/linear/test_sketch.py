"""Count-sketch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.world import World
from tests.compress.codecs.checks import (
    Outcome,
    assert_linear,
    assert_mean_of_messages,
    assert_ranks_agree,
    average_all,
    gradient,
    through,
)
from tests.compress.examples import examples
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.linear.sketch import SketchCodec
from torsh_distributed.errors import CompressionError, InvalidArgument

SIZES = [0, 1, 3, 20_001]


@examples
@given(st.integers(0, 1000), st.integers(20, 400), st.integers(0, 50))
def test_messages_add_up_to_the_message_of_the_sum_in_the_stated_bytes(numel: int, columns: int, step: int) -> None:
    codec = SketchCodec(columns)
    assert_linear(codec, numel, Key(step=step))
    assert codec.encode(gradient(numel, 0), Key()).numel() * 4 == codec.payload_bytes(numel)


@pytest.mark.parametrize("seed", range(8))
def test_heavy_hitters_are_found_with_their_signs(seed: int) -> None:
    numel, columns = 20_000, 400
    codec, key = SketchCodec(columns), Key(seed=seed)
    x = gradient(numel, seed) * 0.01
    places = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[:20]
    x[places] = torch.where(torch.arange(20) % 2 == 0, 5.0, -5.0)
    got = through(codec, x, key)
    assert int((got != 0).sum()) == codec.num_kept
    # Two of twenty may meet in two of three rows once in a while; then the median is between them.
    assert int(((got - x)[places].abs() < 0.5).sum()) >= 18


def test_an_estimate_is_right_where_nothing_meets() -> None:
    codec = SketchCodec(100)
    x = torch.zeros(1000)
    x[123] = -7.0
    estimates = codec.estimates(codec.encode(x, Key()), 1000, Key())
    assert estimates[123] == -7.0
    assert int((estimates != 0).sum()) <= 10


def test_two_elements_of_different_runs_meet_once_in_as_many_times_as_there_are_columns() -> None:
    codec = SketchCodec(8)
    meetings = 0
    for step in range(200):
        x = torch.zeros(64)
        x[[3, 21]] = torch.tensor([1.0, 2.0])
        table = codec.encode(x, Key(step=step)).view(3, 8)
        meetings += int(((table != 0).sum(dim=1) == 1).sum())
    assert meetings / 600 == pytest.approx(1 / 8, abs=0.05)


def test_a_gradient_smaller_than_its_table_travels_whole() -> None:
    codec = SketchCodec(10)
    x = gradient(33, 0)
    assert codec.is_whole(33)
    assert not codec.is_whole(34)
    assert torch.equal(through(codec, x, Key()), x)


def test_what_is_large_on_no_rank_alone_is_found(world: World) -> None:
    """Every rank has large elements of its own that cancel out, and small ones that add up."""
    by_rank = world.run(average_opposed, num_ranks=2)
    for mean in by_rank:
        assert torch.equal(mean, by_rank[0])
        assert torch.equal(mean[:50], torch.ones(50))


def average_opposed() -> torch.Tensor:
    import torch.distributed as dist

    rank = dist.get_rank()
    x = torch.zeros(10_000)
    x[:50] = 1.0
    x[50:100] = 100.0 if rank == 0 else -100.0
    assert dist.group.WORLD is not None
    return SketchCodec(400).average(x, dist.group.WORLD, Key(rank=rank)).mean


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "shm"), (3, "gloo"), (4, "shm")])
def test_ranks_get_exact_means_of_the_elements_that_stand_out(world: World, num_ranks: int, backend: str) -> None:
    by_rank: list[list[Outcome]] = world.run(
        average_all, partial(SketchCodec, 400), SIZES, {}, num_ranks=num_ranks, backend=backend
    )
    assert_ranks_agree(by_rank)
    assert_mean_of_messages([outcomes[:-1] for outcomes in by_rank])
    own = torch.stack([gradient(SIZES[-1], seed=100 * (len(SIZES) - 1) + rank) for rank in range(num_ranks)])
    codec = SketchCodec(400)
    key = Key(seed=3, step=5, stream=len(SIZES) - 1)
    kept = through(codec, own.sum(dim=0), key) != 0  # the message of the sum, in one process
    mean = by_rank[0][-1].mean
    assert int(((mean != 0) & kept).sum()) >= codec.num_kept - 2  # sums in another order may swap a near tie
    chosen = mean != 0
    torch.testing.assert_close(mean[chosen], own.mean(dim=0)[chosen], rtol=1e-6, atol=1e-7)
    for outcomes, x in zip(by_rank, own, strict=True):
        assert torch.equal(outcomes[-1].sent[chosen], x[chosen])
        assert outcomes[-1].num_bytes == 2 * (num_ranks - 1) * 4 * (3 * 400 + 100) // num_ranks


def test_bad_input_is_refused_and_a_plan_finds_it() -> None:
    with pytest.raises(InvalidArgument, match="columns"):
        SketchCodec(0)
    codec = make_codec("sketch:16")
    assert isinstance(codec, SketchCodec)
    with pytest.raises(CompressionError, match="48 fp32 values"):
        codec.decode(torch.zeros(47), 1000, Key())
