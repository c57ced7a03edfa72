"""The strength of compression follows the error, or the loss, and all ranks follow alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.compress import GradientCompressor
from torsh_distributed.compress.adaptive import (
    AdaptiveCompression,
    configure_compression,
    loss_stability,
    settings_for_stability,
)
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import CompressConfig


def compressor(method: str) -> GradientCompressor:
    return GradientCompressor(CompressConfig(method=method, warmup_steps=0))


@pytest.mark.parametrize(
    ("method", "strategy", "impact", "num_steps", "after"),
    [
        ("topk:0.1", "aggressive", 0.001, 10, "topk:0.08"),
        ("topk:0.1", "aggressive", 0.03, 10, "topk:0.12"),
        ("topk:0.1", "aggressive", 0.01, 10, "topk:0.1"),
        ("topk:0.1", "conservative", 0.001, 99, "topk:0.1"),
        ("topk:0.1", "conservative", 0.001, 100, "topk:0.09"),
        ("topk:0.0001", "aggressive", 0.001, 10, "topk:0.0001"),
        ("topk:1", "aggressive", 0.5, 10, "topk:1"),
        ("nbit:4", "aggressive", 0.5, 20, "nbit:6"),
        ("nbit:2", "aggressive", 0.001, 10, "nbit:2"),
        ("powersgd:4", "aggressive", 0.001, 10, "powersgd:3"),
    ],
)
def test_small_impact_means_fewer_bytes_and_large_impact_more(
    method: str, strategy: str, impact: float, num_steps: int, after: str
) -> None:
    chosen = compressor(method)
    adaptive = AdaptiveCompression(chosen, strategy, impact=lambda: impact)
    for _ in range(num_steps):
        adaptive.step()
    assert chosen.config.method == after


def test_without_a_callback_the_measured_error_counts() -> None:
    heard: list[events.DecisionEvent] = []
    unsubscribe = events.subscribe(heard.append, events.DecisionEvent)
    chosen = compressor("topk:0.01")
    adaptive = AdaptiveCompression(chosen, "aggressive")
    for step in range(10):
        chosen.compress("weight", torch.randn(5000, generator=torch.Generator().manual_seed(step)))
        chosen.step()
        adaptive.step()
    unsubscribe()
    assert chosen.config.method == "topk:0.012", "noise has no large elements: topk leaves nearly all of it out"
    assert "more bytes" in heard[0].reason


def adapt_on_each_rank() -> str:
    """Each rank sees another impact; the mean decides."""
    chosen = GradientCompressor(CompressConfig(method="topk:0.1", warmup_steps=0), group=dist.group.WORLD)
    adaptive = AdaptiveCompression(chosen, "aggressive", impact=lambda: 0.0 if dist.get_rank() else 0.1)
    for _ in range(10):
        adaptive.step()
    return chosen.config.method


def test_ranks_decide_on_their_mean(world: World) -> None:
    assert world.run(adapt_on_each_rank) == ["topk:0.12", "topk:0.12"]


def test_a_steady_loss_is_compressed_hard_and_an_unsteady_one_hardly() -> None:
    chosen = compressor("topk:0.1")
    adaptive = AdaptiveCompression(chosen, "loss_aware")
    for step in range(10):
        adaptive.step(2.0 + 0.01 * step)
    assert (chosen.config.method, chosen.config.period) == ("topk:0.001", 1)
    for step in range(10):
        adaptive.step(2.0 * (step % 2))
    assert (chosen.config.method, chosen.config.period) == ("bf16", 4)


def test_stability_and_settings_at_their_edges() -> None:
    assert loss_stability([1.0] * 9) == 1.0
    assert loss_stability([2.0] * 10) == 1.0
    assert loss_stability([0.0] * 10) == 0.0
    assert loss_stability([-1.0, 1.0] * 5) == 0.0
    config = CompressConfig(method="int8", warmup_steps=7)
    assert settings_for_stability(0.8, config).method == "topk:0.01"
    assert settings_for_stability(0.8, config).warmup_steps == 7


@pytest.mark.parametrize(
    ("num_parameters", "gbps", "tolerance", "method", "period"),
    [
        (10**9, 1.0, 0.0, "topk:0.001", 40),
        (10**11, 1.0, 0.0, "topk:0.001", 10),
        (10**9, 10.0, 0.0, "topk:0.01", 4),
        (10**9, 100.0, 0.2, "int8", 4),
        (10**9, 100.0, 0.1, "none", 4),
    ],
)
def test_a_first_guess(num_parameters: int, gbps: float, tolerance: float, method: str, period: int) -> None:
    config = configure_compression(num_parameters, gbps, tolerance)
    assert (config.method, config.period) == (method, period)


def test_what_cannot_adapt_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no number"):
        AdaptiveCompression(compressor("int8"))
    with pytest.raises(InvalidArgument, match="needs the loss"):
        AdaptiveCompression(compressor("topk:0.1"), "loss_aware").step()
