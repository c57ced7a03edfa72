"""Casts: torch's own rounding, and overflow that is counted and reported."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor

from tests.bed.world import World
from tests.compress.codecs.checks import gradient, through
from tests.compress.examples import examples
from tests.compress.gradients import gradients
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.linear.cast import Bf16Codec, CastCodec, Fp16Codec, Fp32Codec
from torsh_distributed.errors import CompressionError
from torsh_distributed.events import AlertEvent, subscribe


@given(gradients())
@examples
def test_a_message_is_what_torch_casts_to(x: Tensor) -> None:
    for codec, dtype in ((Fp16Codec(), torch.float16), (Bf16Codec(), torch.bfloat16), (Fp32Codec(), torch.float32)):
        payload = codec.encode(x, Key())
        assert payload.numel() * payload.element_size() == codec.payload_bytes(x.numel())
        assert torch.equal(codec.decode(payload, x.numel(), Key()), x.to(dtype).float())


@pytest.mark.parametrize("method", ["none", "fp16", "bf16"])
def test_a_payload_of_another_size_is_refused(method: str) -> None:
    codec = make_codec(method)
    with pytest.raises(CompressionError, match="message of 10 elements has"):
        codec.decode(codec.encode(torch.zeros(9), Key()), 10, Key())


def average_large() -> tuple[int, list[str], int, bool]:
    """Rank 1 has an element that fp16 cannot hold, even divided by the ranks."""
    group = dist.group.WORLD
    assert group is not None
    alerts: list[str] = []
    unsubscribe = subscribe(lambda event: alerts.append(event.message), AlertEvent)
    x = torch.ones(100)
    x[7] = 1e6 if group.rank() == 1 else 1.0
    fp16, bf16 = Fp16Codec(), Bf16Codec()
    fp16.average(x, group, Key(step=5))
    mean = bf16.average(x, group, Key()).mean
    unsubscribe()
    return fp16.num_overflows, alerts, bf16.num_overflows, bool(mean.isfinite().all())


def test_overflow_is_counted_and_reported_on_every_rank(world: World) -> None:
    for num_lost, alerts, num_lost_bf16, is_finite in world.run(average_large, num_ranks=2, backend="shm"):
        assert num_lost == 1
        assert len(alerts) == 1
        assert "1 of 100 elements of a gradient do not fit fp16 (step 5" in alerts[0]
        assert num_lost_bf16 == 0
        assert is_finite


def compare_with_torch() -> None:
    group = dist.group.WORLD
    assert group is not None
    x = gradient(1000, group.rank())
    for codec in (Fp32Codec(), Fp16Codec(), Bf16Codec()):
        averaged = codec.average(x, group, Key())
        expected = (x / group.size()).to(codec.dtype)
        dist.all_reduce(expected)
        assert torch.equal(averaged.mean, expected.float())
        torch.testing.assert_close(averaged.sent, through(codec, x, Key()), rtol=0.01, atol=1e-4)
        assert averaged.num_bytes == 2 * codec.payload_bytes(1000) * (group.size() - 1) // group.size()


def test_the_mean_is_that_of_torch_in_the_same_type(world: World) -> None:
    world.run(compare_with_torch, num_ranks=2, backend="gloo")


def test_casts_share_one_implementation() -> None:
    assert all(isinstance(make_codec(method), CastCodec) for method in ("none", "fp16", "bf16"))
