"""Twenty steps at every combination: losses and gradient norms are those in tests/golden, of one process."""

from __future__ import annotations

import pytest

from tests.bed.world import World
from tests.parallel.golden import BATCH, CLIP, FEW_STEPS, MODELS, STEPS, golden, make_optimizer
from torsh_distributed import events
from torsh_distributed.plan import MeshConfig, PipelineConfig, Plan, TensorConfig, TrainingConfig
from torsh_distributed.train import parallelize

SPLIT = TensorConfig(sequence_parallel=True, loss_parallel=True)
TWO = PipelineConfig(num_microbatches=2)


def plan_of(mesh: MeshConfig, **sections: object) -> Plan:
    training = TrainingConfig(steps=STEPS, batch_size=BATCH, gradient_clipping=CLIP)
    return Plan(mesh=mesh, training=training, pipeline=TWO, **sections)  # type: ignore[arg-type]


def train(name: str, plan: Plan, num_steps: int) -> list[tuple[float, float]]:
    make, batches, loss_fn = MODELS[name]
    model = make()
    engine = parallelize(model, make_optimizer(model), plan, loss_fn=loss_fn)
    seen: list[events.StepEvent] = []
    unsubscribe = events.subscribe(seen.append, events.StepEvent)
    rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
    rows = slice(rank * BATCH // degree, (rank + 1) * BATCH // degree)
    losses = [engine.step((inputs[rows], targets[rows])) for inputs, targets in batches[:num_steps]]
    unsubscribe()
    return list(zip(losses, [one.grad_norm or 0.0 for one in seen], strict=True))


def train_all(cases: list[tuple[str, Plan]], num_steps: int) -> list[list[tuple[float, float]]]:
    return [train(name, plan, num_steps) for name, plan in cases]


TWO_RANKS = [("odd", plan_of(MeshConfig(pp=2))), ("gpt", plan_of(MeshConfig(tp=2), tensor=SPLIT))]


@pytest.mark.parametrize(
    ("num_ranks", "num_steps", "cases"),
    [
        (2, FEW_STEPS, TWO_RANKS),
        pytest.param(2, STEPS, TWO_RANKS, marks=pytest.mark.matrix),
        pytest.param(
            4,
            STEPS,
            [("gpt", plan_of(MeshConfig(dp=2, pp=2))), ("gpt", plan_of(MeshConfig(dp=1, shard=2, tp=2)))],
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            4,
            STEPS,
            [("odd", plan_of(MeshConfig(dp=1, shard=2, pp=2))), ("gpt", plan_of(MeshConfig(dp=1, pp=2, cp=2)))],
            marks=pytest.mark.matrix,
        ),
        pytest.param(8, STEPS, [("gpt", plan_of(MeshConfig(dp=2, tp=2, pp=2)))], marks=pytest.mark.matrix),
    ],
    ids=["two ranks, in short", "two ranks", "four ranks", "four ranks, in stages", "eight ranks"],
)
def test_losses_and_norms_are_the_golden_ones(
    world: World, num_ranks: int, num_steps: int, cases: list[tuple[str, Plan]]
) -> None:
    for results in world.run(train_all, cases, num_steps, num_ranks=num_ranks, backend="torsh", timeout_s=100):
        for (name, plan), found in zip(cases, results, strict=True):
            for mine, expected in zip(found, golden(name)[:num_steps], strict=True):
                assert mine == pytest.approx(expected, abs=1e-4), (name, plan.mesh.equation)
