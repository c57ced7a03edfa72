"""Sums of linear messages: damage to the result or to a summand is raised by every rank, rounding is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.bed.world import World
from tests.compress.codecs.checks import gradient
from tests.compress.examples import examples
from tests.compress.gradients import make_gradient
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Codec, Key
from torsh_distributed.compress.exchange import checked_sum
from torsh_distributed.compress.exchange.checked_sum import SumFacts, find_damage
from torsh_distributed.errors import CompressionError


def facts_of(summands: list[Tensor], results: list[Tensor]) -> tuple[SumFacts, ...]:
    """What the ranks know after they summed up, in one process."""
    return tuple(
        SumFacts(
            float(own.sum(dtype=torch.float64)),
            float(own.abs().sum()),
            float(result.sum(dtype=torch.float64)),
            float(hash(result.numpy().tobytes()) % 2**32) if result.isfinite().all() else -1.0,
        )
        for own, result in zip(summands, results, strict=True)
    )


@given(st.sampled_from(["normal", "heavy", "sparse", "subnormal", "huge"]), st.integers(1, 3000), st.integers(2, 9))
@examples
def test_rounding_is_never_taken_for_damage(kind: str, numel: int, num_ranks: int) -> None:
    summands = [make_gradient(kind, numel, seed) for seed in range(num_ranks)]
    total = torch.stack(summands).sum(0)
    assert find_damage(facts_of(summands, [total] * num_ranks)) is None


def test_a_result_that_differs_on_one_rank_names_it() -> None:
    summands = [make_gradient("normal", 1000, seed) for seed in range(4)]
    total = torch.stack(summands).sum(0)
    other = total.clone()
    other.view(torch.uint8)[12] ^= 1  # the last bit of a value: far below rounding
    found = find_damage(facts_of(summands, [total, total, other, total]))
    assert found is not None
    assert found.ranks == [2]


def test_with_two_ranks_the_one_that_is_off_is_named() -> None:
    summands = [make_gradient("normal", 1000, seed) for seed in range(2)]
    total = torch.stack(summands).sum(0)
    other = total.clone()
    other[3] += 100
    found = find_damage(facts_of(summands, [total, other]))
    assert found is not None
    assert found.ranks == [1]


def damage_result(message: Tensor, all_reduce: Callable[..., Tensor], **options: Any) -> Tensor:
    """The lowest bit of one value changes on its way to rank 1."""
    result = all_reduce(message, **options)
    if dist.get_rank() == 1:
        result.view(torch.uint8)[8] ^= 1
    return result


def damage_summand(message: Tensor, all_reduce: Callable[..., Tensor], **options: Any) -> Tensor:
    """An exponent bit of what rank 1 contributes changes before it is added."""
    if dist.get_rank() == 1:
        message.view(torch.uint8)[11] ^= 2
    return all_reduce(message, **options)


def damage_with_nan(message: Tensor, all_reduce: Callable[..., Tensor], **options: Any) -> Tensor:
    """Values become NaN on their way to rank 1."""
    result = all_reduce(message, **options)
    if dist.get_rank() == 1:
        result[:10] = torch.nan
    return result


METHODS = ["randomk:0.1", "bernoulli:0.1", "sketch:200", "powersgd:2"]


def codec_for(method: str) -> Codec:
    codec = make_codec(method)
    codec.set_shapes(0, [(100, 120)])
    return codec


def average_with_damage() -> dict[tuple[str, str], str]:
    """Runs on every rank: the error of each case here, and that the next average succeeds."""
    group = dist.group.WORLD
    assert group is not None
    found = {}
    original = checked_sum.all_reduce
    x = gradient(12_000, group.rank())
    for damage in (damage_result, damage_summand, damage_with_nan):
        for method in METHODS:
            codec = codec_for(method)
            checked_sum.all_reduce = lambda message, damage=damage, **options: damage(message, original, **options)  # type: ignore[assignment]  # stands for the wire
            with pytest.raises(CompressionError) as caught:
                codec.average(x, group, Key())
            checked_sum.all_reduce = original
            found[damage.__name__, method] = caught.value.message
            expected = codec_for(method).average(x, group, Key()).mean
            assert torch.equal(codec.average(x, group, Key()).mean, expected)
    return found


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "gloo"), (3, "shm")])
def test_damage_on_one_rank_is_raised_by_all(world: World, num_ranks: int, backend: str) -> None:
    first, *others = world.run(average_with_damage, num_ranks=num_ranks, backend=backend)
    assert all(other == first for other in others)
    for (damage, _), message in first.items():
        expected = "not the sum of what the ranks sent" if damage == "damage_summand" else "received other values"
        assert expected in message


def average_that_overflows() -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    return codec_for("randomk:0.5").average(torch.full((12_000,), 3e38), group, Key()).mean


def test_a_sum_that_overflows_is_not_taken_for_damage(world: World) -> None:
    for mean in world.run(average_that_overflows, num_ranks=2):
        assert not mean.isfinite().all()
