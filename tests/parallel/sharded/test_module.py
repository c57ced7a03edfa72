"""Sharded training against one process: the same losses and gradient norms, whatever is sharded and over how many."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bed.world import World
from tests.parallel.golden import CLIP, FEW_STEPS, MODELS, STEPS, golden, loss_of, make_optimizer, train_alone
from torsh_distributed import events
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

Curve = list[tuple[float, float]]


def train(name: str, sections: dict[str, Any], num_steps: int) -> Curve:
    make, batches, loss_fn = MODELS[name]
    model = make()
    training = {"steps": num_steps, "gradient_clipping": CLIP, **sections.get("training", {})}
    plan = Plan.from_dict({**sections, "training": training})
    norms: list[float] = []
    stop = events.subscribe(lambda event: norms.append(event.grad_norm), events.StepEvent)  # type: ignore[attr-defined]
    if name.startswith("moe"):
        loss_fn = loss_of(name, model)
    engine = parallelize(model, make_optimizer(model), plan, loss_fn=loss_fn)
    losses = [engine.step(batch) for batch in engine.batches(batches)]
    stop()
    return list(zip(losses, norms, strict=True))


def train_all(cases: list[tuple[str, dict[str, Any]]], num_steps: int = STEPS) -> list[Curve]:
    return [train(name, sections, num_steps) for name, sections in cases]


def shard(degree: int, strategy: str, *, dp: int = 1, accumulation: int = 1, **fsdp: Any) -> dict[str, Any]:
    return {
        "mesh": {"dp": dp, "shard": degree},
        "fsdp": {"strategy": strategy, **fsdp},
        "training": {"gradient_accumulation": accumulation},
        "ddp": {"find_unused_parameters": True},
    }


TWO_RANKS = [
    ("gpt", {}),
    ("gpt", shard(2, "shard_optimizer", accumulation=2)),
    ("gpt", shard(2, "shard_grad_op")),
    ("gpt", shard(2, "full_shard", accumulation=2, wrap="none")),
    ("gpt", shard(2, "full_shard", forward_prefetch=True, backward_prefetch="none", max_gathered_ahead=2)),
    ("mlp", shard(2, "full_shard", wrap="size", wrap_min_params=500, max_gathered_ahead=3)),
    ("mlp", shard(2, "shard_grad_op", accumulation=4)),
    ("odd", shard(2, "full_shard")),
    ("odd", shard(2, "shard_optimizer")),
]
FOUR_RANKS = [
    ("gpt", shard(4, "full_shard", accumulation=2, ignored_modules=["token", "blocks.0"])),
    ("gpt", shard(2, "hybrid_shard", dp=2, accumulation=2)),
    ("mlp", shard(2, "shard_optimizer", dp=2)),
    ("mlp", shard(2, "shard_grad_op", dp=2)),
    ("odd", shard(4, "full_shard", accumulation=2)),
    ("odd", shard(4, "shard_grad_op", wrap="size", wrap_min_params=50)),
    ("odd", shard(4, "shard_optimizer", accumulation=2)),
    ("odd", shard(2, "hybrid_shard", dp=2)),
]


@pytest.mark.parametrize(
    ("num_ranks", "num_steps", "cases"),
    [
        pytest.param(2, FEW_STEPS, TWO_RANKS, id="2 ranks, in short"),
        pytest.param(2, STEPS, TWO_RANKS, id="2 ranks", marks=pytest.mark.matrix),
        pytest.param(4, STEPS, FOUR_RANKS, id="4 ranks", marks=pytest.mark.matrix),
    ],
)
def test_losses_and_norms_are_those_of_one_process(
    world: World, num_ranks: int, num_steps: int, cases: list[tuple[str, dict[str, Any]]]
) -> None:
    results = world.run(train_all, cases, num_steps, num_ranks=num_ranks, backend="torsh", timeout_s=240)
    for rank, curves in enumerate(results):
        for (name, sections), curve in zip(cases, curves, strict=True):
            expected = golden(name)[:num_steps]
            for step, ((loss, norm), (true_loss, true_norm)) in enumerate(zip(curve, expected, strict=True)):
                where = f"rank {rank}, step {step}, {name} {sections}"
                assert loss == pytest.approx(true_loss, abs=1e-4), where
                assert norm == pytest.approx(true_norm, rel=1e-3, abs=1e-4), where


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_golden_files_are_what_one_process_gets(name: str) -> None:
    for (loss, norm), (true_loss, true_norm) in zip(train_alone(name), golden(name), strict=True):
        assert loss == pytest.approx(true_loss, abs=2e-5)
        assert norm == pytest.approx(true_norm, rel=1e-3, abs=2e-5)


def test_gloo_gives_the_same(world: World) -> None:
    cases = [("mlp", shard(2, strategy)) for strategy in ("full_shard", "shard_optimizer")]
    for curves in world.run(train_all, cases, timeout_s=120):
        for curve in curves:
            assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in golden("mlp")], abs=1e-4)
