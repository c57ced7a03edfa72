"""Utilization: counted operations over measured time."""

from __future__ import annotations

import pytest
import torch

from tests.bed.world import World
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.train import UtilizationMeter, UtilizationReport, parallelize
from torsh_distributed.train.demos.gpt import CONTEXT, CharGPT, next_character_loss

WIDTH, LAYERS, VOCABULARY, BATCH = 32, 2, 64, 4


def measured(is_fused: bool) -> tuple[int, UtilizationReport]:
    torch.manual_seed(0)
    model = CharGPT(VOCABULARY, width=WIDTH, num_layers=LAYERS, num_heads=2)
    plan = Plan.from_dict({"training": {"fused_loss": is_fused}, "compile": {"enabled": True}})
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=next_character_loss)
    ids = torch.randint(VOCABULARY, (BATCH, CONTEXT))
    counted = engine.step_flops((ids, ids))
    # Steps that are not compiled are enough here, and much faster to start.
    torch.compiler.set_stance("force_eager")
    meter = UtilizationMeter(engine, (ids, ids), peak_flops=1e12)
    with pytest.raises(InvalidArgument, match="no step was measured"):
        meter.report()
    with meter:
        for _ in range(3):
            engine.step((ids, ids))
    return counted, meter.report()


def both() -> list[tuple[int, UtilizationReport]]:
    return [measured(False), measured(True)]


def test_utilization_counts_products_and_attention_once_each_way(world: World) -> None:
    tokens = BATCH * CONTEXT
    products = LAYERS * 12 * WIDTH * WIDTH + VOCABULARY * WIDTH
    attention = LAYERS * 2 * CONTEXT * WIDTH
    for results in world.run(both, num_ranks=2):
        for counted, report in results:
            assert counted == 3 * 2 * tokens * (products + attention)
            assert report.num_steps == 3
            assert report.mfu == pytest.approx(report.flops_per_s / 1e12)
            assert report.flops_per_s == pytest.approx(counted / report.step_s)
            assert report.samples_per_s == pytest.approx(2 * BATCH / report.step_s)
            assert report.peak_bytes is None
            assert report.to_dict()["num_steps"] == 3


def counted_by_part(degree: int) -> int:
    torch.manual_seed(0)
    model = CharGPT(VOCABULARY, width=WIDTH, num_layers=LAYERS, num_heads=2)
    plan = Plan.from_dict({"mesh": {"dp": 1, "tp": degree}})
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=next_character_loss)
    ids = torch.randint(VOCABULARY, (BATCH, CONTEXT))
    return engine.step_flops((ids, ids))


def test_a_rank_counts_its_part_of_a_split_layer(world: World) -> None:
    (whole,) = world.run(counted_by_part, 1, num_ranks=1)
    halves = world.run(counted_by_part, 2, num_ranks=2)
    assert sum(halves) == whole
