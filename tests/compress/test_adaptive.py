"""The strength of compression follows the error, or the loss, and all ranks follow alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.compress import GradientCompressor
from torsh_distributed.compress.adaptive import (
    AdaptiveCompression,
    loss_stability,
    settings_for_stability,
)
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.plan import CompressConfig, Plan
from torsh_distributed.train import parallelize


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


def test_what_cannot_adapt_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no number"):
        AdaptiveCompression(compressor("int8"))
    with pytest.raises(InvalidArgument, match="needs the loss"):
        AdaptiveCompression(compressor("topk:0.1"), "loss_aware").step()


def test_a_resume_goes_on_with_the_number_and_the_records() -> None:
    config = CompressConfig(method="topk:0.1", warmup_steps=0, adapt="aggressive")
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(5000, generator=generator) for _ in range(30)]

    def train(chosen: GradientCompressor, some: list[torch.Tensor]) -> list[str]:
        methods = []
        for gradient in some:
            chosen.compress("weight", gradient)
            chosen.step()
            chosen.adapt(1.0)
            methods.append(chosen.config.method)
        return methods

    whole = train(GradientCompressor(config), gradients)
    first, second = GradientCompressor(config), GradientCompressor(config)
    before = train(first, gradients[:15])
    second.load_state_dict(first.state_dict())
    assert before + train(second, gradients[15:]) == whole
    assert len(set(whole)) == 4, "it changes every ten steps"
    other = GradientCompressor(config.replace(method="nbit:4"))
    other.load_state_dict(first.state_dict())
    assert other.config.method == "nbit:4", "the plan names another method"


@pytest.mark.parametrize(("method", "adapt"), [("int8", "aggressive"), ("none", "loss_aware"), ("auto", "loss_aware")])
def test_a_plan_without_a_number_to_adapt_is_refused(method: str, adapt: str) -> None:
    with pytest.raises(ConfigurationError, match=r"compress\.adapt.*: \w+ (has no number|is not a method)"):
        Plan(compress={"method": method, "adapt": adapt})


def train_adapted(num_steps: int) -> tuple[list[str], list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    plan = Plan.model_validate(
        {
            "mesh": {"dp": 2},
            "training": {"steps": num_steps},
            "compress": {"method": "topk:0.1", "warmup_steps": 0, "skip_below_numel": 0, "adapt": "aggressive"},
        }
    )
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=functional.mse_loss)
    inputs = torch.randn(16, 16)
    losses, methods = [], []
    for batch in engine.batches([(inputs, inputs[:, :4].sin())]):
        losses.append(engine.step(batch))
        assert engine.strategy.compressor is not None
        methods.append(engine.strategy.compressor.config.method)
    return methods, losses


def test_an_engine_adapts_on_every_rank_alike(world: World) -> None:
    (methods, losses), (others, _) = world.run(train_adapted, 25, num_ranks=2)
    assert methods == others
    assert list(dict.fromkeys(methods)) == ["topk:0.1", "topk:0.12", "topk:0.144"]
    assert losses[-1] < losses[0] / 2
