"""Axes together: every layout gives the losses and gradient norms of one process, and its state fits every other."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.bed.world import World
from tests.parallel.reference import BATCH, batches, build, train_alone
from torsh_distributed import events
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import MeshConfig, PipelineConfig, Plan, TensorConfig, TrainingConfig
from torsh_distributed.train import Engine, parallelize
from torsh_distributed.train.demos.gpt import next_character_loss

STEPS, CLIP = 4, 0.5
SPLIT = TensorConfig(sequence_parallel=True, loss_parallel=True)
INTERLEAVED = PipelineConfig(schedule="interleaved_one_f_one_b", stages_per_rank=2, num_microbatches=2)
ZERO_BUBBLE = PipelineConfig(schedule="zbv_zero_bubble", stages_per_rank=2, num_microbatches=4)


def plan_of(mesh: MeshConfig, **sections: Any) -> Plan:
    training = TrainingConfig(steps=STEPS, batch_size=BATCH, gradient_clipping=CLIP, **sections.pop("training", {}))
    return Plan(mesh=mesh, training=training, **sections)


def engine_of(kind: str, plan: Plan, *, is_function: bool = False) -> Engine:
    model = build(kind, num_layers=4)
    optimizer: Any = partial(torch.optim.AdamW, lr=5e-3)
    return parallelize(
        model, optimizer if is_function else optimizer(model.parameters()), plan, loss_fn=next_character_loss
    )


def run(engine: Engine, first: int = 0, last: int = STEPS) -> list[float]:
    """Losses and norms, one after the other."""
    seen: list[events.StepEvent] = []
    out = []
    unsubscribe = events.subscribe(seen.append, events.StepEvent)
    for inputs, targets in batches(STEPS)[first:last]:
        rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
        rows = slice(rank * BATCH // degree, (rank + 1) * BATCH // degree)
        out.append(engine.step((inputs[rows], targets[rows])))
    unsubscribe()
    norms = [one.grad_norm or 0.0 for one in seen]
    return [value for pair in zip(out, norms, strict=True) for value in pair]


def train_all(cases: list[tuple[str, Plan]], num_steps: int) -> list[list[float]]:
    return [
        run(engine_of(kind, plan, is_function=number % 2 == 1), 0, num_steps)
        for number, (kind, plan) in enumerate(cases)
    ]


def check(world: World, cases: list[tuple[str, Plan]], num_ranks: int, num_steps: int = STEPS) -> None:
    expected = {kind: train_alone(kind, num_steps=num_steps, clip=CLIP, num_layers=4) for kind, _ in cases}
    for results in world.run(train_all, cases, num_steps, num_ranks=num_ranks, backend="torsh", timeout_s=90):
        for (kind, plan), values in zip(cases, results, strict=True):
            assert values == pytest.approx(expected[kind], abs=1e-4, rel=1e-4), (kind, plan.mesh.equation)


@pytest.mark.parametrize("num_steps", [2, pytest.param(STEPS, marks=pytest.mark.matrix)])
def test_each_axis_alone(world: World, num_steps: int) -> None:
    check(
        world,
        [
            ("gpt", plan_of(MeshConfig(tp=2))),
            ("tied", plan_of(MeshConfig(tp=2), tensor=SPLIT, training={"gradient_accumulation": 2})),
            ("tied", plan_of(MeshConfig(pp=2))),
            ("gpt", plan_of(MeshConfig(pp=2), pipeline=INTERLEAVED, training={"gradient_accumulation": 2})),
            ("llama", plan_of(MeshConfig(cp=2))),
        ],
        2,
        num_steps,
    )


@pytest.mark.matrix
def test_pairs_of_axes(world: World) -> None:
    check(
        world,
        [
            ("gpt", plan_of(MeshConfig(dp=2, tp=2))),
            ("llama", plan_of(MeshConfig(shard=2, tp=2, dp=1))),
            ("tied", plan_of(MeshConfig(dp=2, pp=2), pipeline=ZERO_BUBBLE)),
            ("tied", plan_of(MeshConfig(tp=2, pp=2), tensor=SPLIT)),
            ("gpt", plan_of(MeshConfig(dp=2, cp=2))),
            ("gpt", plan_of(MeshConfig(tp=2, cp=2))),
        ],
        4,
    )


@pytest.mark.matrix
def test_three_axes(world: World) -> None:
    two = PipelineConfig(num_microbatches=2)
    check(
        world,
        [
            ("tied", plan_of(MeshConfig(dp=2, tp=2, pp=2), pipeline=two)),
            ("gpt", plan_of(MeshConfig(dp=2, shard=2, pp=2), pipeline=two)),
            ("gpt", plan_of(MeshConfig(dp=2, pp=2, cp=2), pipeline=two)),
            ("tied", plan_of(MeshConfig(dp=2, shard=2, tp=2))),
        ],
        8,
        num_steps=2,
    )


def save(plan: Plan) -> dict[str, Any]:
    engine = engine_of("tied", plan)
    run(engine, 0, 2)
    return engine.state_dict()


def resume(plan: Plan, state: dict[str, Any]) -> list[float]:
    engine = engine_of("tied", plan)
    engine.load_state_dict(state)
    return run(engine, 2, STEPS)


def save_and_resume(plans: list[Plan]) -> list[list[float]]:
    """Saved under each plan, resumed under the next."""
    states = [save(plan) for plan in plans]
    return [resume(plan, states[index - 1]) for index, plan in enumerate(plans)]


def test_state_saved_at_one_layout_goes_on_at_another(world: World) -> None:
    expected = train_alone("tied", num_steps=STEPS, clip=CLIP, num_layers=4)[4:]
    plans = [
        plan_of(MeshConfig(dp=2)),
        plan_of(MeshConfig(tp=2)),
        plan_of(MeshConfig(pp=2)),
        plan_of(MeshConfig(pp=2), pipeline=ZERO_BUBBLE),
    ]
    for results in world.run(save_and_resume, plans, num_ranks=2, backend="torsh", timeout_s=90):
        for values in results:
            assert values == pytest.approx(expected, abs=1e-4, rel=1e-4)


def refuse(plan: Plan, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        engine_of("gpt", plan)


def refuse_all() -> None:
    refuse(plan_of(MeshConfig(pp=2), pipeline=PipelineConfig(schedule="looped_bfs", stages_per_rank=5)), "10 stages")
    refuse(
        plan_of(
            MeshConfig(pp=2), pipeline=PipelineConfig(schedule="dual_pipe_v", stages_per_rank=2, num_microbatches=1)
        ),
        "pipeline.schedule dual_pipe_v",
    )
    model = build("gpt")
    for block in model.blocks:
        block.num_heads = 3
    with pytest.raises(ConfigurationError, match="3 heads, which 2 ranks cannot share evenly"):
        parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_of(MeshConfig(tp=2)))


def test_what_does_not_fit_is_refused_before_the_first_step(world: World) -> None:
    world.run(refuse_all, num_ranks=2)
