"""What every codec is asked, in one process and among ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.compress.codecs.base import Codec, Key

MakeCodec = Callable[[], Codec]


def gradient(numel: int, seed: int) -> Tensor:
    """Random, with tails heavier than normal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) ** 3


def through(codec: Codec, x: Tensor, key: Key) -> Tensor:
    """What a message of `x` says."""
    return codec.decode(codec.encode(x, key), x.numel(), key)


def assert_contracts(codec: Codec, x: Tensor, key: Key) -> None:
    """|decode(encode(x)) - x|² ≤ (1 - α)|x|² with the α the codec states."""
    alpha = codec.contraction(x.numel())
    assert alpha is not None
    assert 0 < alpha <= 1
    error = (through(codec, x, key).double() - x.double()).square().sum()
    assert error <= (1 - alpha) * x.double().square().sum() * (1 + 1e-9)


class Outcome(NamedTuple):
    """What one rank has after an average."""

    mean: Tensor
    sent: Tensor
    num_bytes: int
    message: Tensor
    """What this rank's message says when it is decoded on its own."""


def average_all(make: MakeCodec, sizes: list[int], shapes: dict[int, list[tuple[int, ...]]]) -> list[Outcome]:
    """Runs on every rank: average a gradient of each size, the rank's own."""
    outcomes = []
    group = dist.group.WORLD
    assert group is not None
    for stream, numel in enumerate(sizes):
        codec, alone = make(), make()
        for each in (codec, alone):
            each.set_shapes(stream, shapes.get(stream, [(numel,)]))
        x = gradient(numel, seed=100 * stream + dist.get_rank())
        key = Key(seed=3, step=5, stream=stream, rank=dist.get_rank())
        averaged = codec.average(x.clone(), group, key)
        assert averaged.mean.dtype == averaged.sent.dtype == torch.float32
        assert averaged.mean.shape == averaged.sent.shape == (numel,)
        outcomes.append(Outcome(averaged.mean, averaged.sent, averaged.num_bytes, through(alone, x, key)))
    return outcomes


def assert_ranks_agree(by_rank: list[list[Outcome]]) -> None:
    """The same bits everywhere, and at every element the mean of what the ranks say they sent."""
    for outcomes in zip(*by_rank, strict=True):
        for other in outcomes[1:]:
            assert torch.equal(outcomes[0].mean, other.mean)
        sent = torch.stack([outcome.sent for outcome in outcomes]).double().mean(dim=0).float()
        torch.testing.assert_close(outcomes[0].mean, sent, rtol=1e-5, atol=1e-6)


def assert_mean_of_messages(by_rank: list[list[Outcome]]) -> None:
    """What the ranks have is what one process computes from all their messages."""
    for outcomes in zip(*by_rank, strict=True):
        total = torch.stack([outcome.message for outcome in outcomes]).double().mean(dim=0).float()
        torch.testing.assert_close(outcomes[0].mean, total, rtol=1e-5, atol=1e-6)
        for outcome in outcomes:
            assert torch.equal(outcome.sent, outcome.message)


def assert_linear(codec: Codec, numel: int, key: Key) -> None:
    """The message of a sum is the sum of messages; exactly so for small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(numel)
    parts = [torch.randint(-1000, 1000, (numel,), generator=generator).float() for _ in range(3)]
    together = codec.encode(torch.stack(parts).sum(dim=0), key)
    assert torch.equal(together, torch.stack([codec.encode(part, key) for part in parts]).sum(dim=0))


def assert_unbiased(codec: Codec, x: Tensor, num_draws: int = 200) -> None:
    """The mean of many decoded messages lies within five standard errors of `x`, at every element."""
    got = torch.stack([through(codec, x, Key(step=step, rank=step)) for step in range(num_draws)]).double()
    error = got.std(dim=0) / num_draws**0.5
    assert ((got.mean(dim=0) - x).abs() <= 5 * error + 1e-6).all()


def travelling(payload_bytes: int) -> int:
    """A payload in its envelope: a header of 32 bytes, and zeros up to a multiple of 16."""
    return 32 + -(-payload_bytes // 16) * 16
