"""Experts together with every other axis: twenty steps give the losses and gradient norms in tests/golden.

Those are of one process in which every expert computes every token, with plain torch operations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.bed.world import World
from tests.parallel.golden import (
    BATCH,
    CLIP,
    EXPERTS,
    FEW_STEPS,
    MICROBATCHES,
    MODELS,
    STEPS,
    golden,
    loss_of,
    make_optimizer,
    moe,
)
from torsh_distributed import events
from torsh_distributed.parallel.expert.balancing.lending import COPY_ROWS
from torsh_distributed.parallel.sharded.shared_shards import local_part
from torsh_distributed.plan import (
    ExpertConfig,
    MeshConfig,
    PipelineConfig,
    Plan,
    TensorConfig,
    TrainingConfig,
)
from torsh_distributed.train import Engine, parallelize

SPLIT = TensorConfig(sequence_parallel=True, loss_parallel=True)
TWO = PipelineConfig(num_microbatches=2)
INTERLEAVED = PipelineConfig(schedule="interleaved_one_f_one_b", stages_per_rank=2, num_microbatches=2)
ZERO_BUBBLE = PipelineConfig(schedule="zbv_zero_bubble", stages_per_rank=2, num_microbatches=2)
FEW = 3
AGAIN = {"strategy": "uniform", "every_n_layers": 1}
WHOLE, PIECES = "moe", "moe_microbatches"


def plan_of(mesh: MeshConfig, pipeline: PipelineConfig = TWO, **sections: Any) -> Plan:
    options = sections.pop("training", {})
    training = TrainingConfig(steps=STEPS, batch_size=BATCH, gradient_clipping=CLIP, **options)
    return Plan(mesh=mesh, training=training, pipeline=pipeline, **sections)


def engine_of(plan: Plan, config: ExpertConfig = EXPERTS) -> Engine:
    model = moe(config)
    return parallelize(model, make_optimizer(model), plan, loss_fn=loss_of(WHOLE, model))


def part(rows: Tensor, engine: Engine, num_pieces: int) -> Tensor:
    """This rank's share of every microbatch."""
    rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
    return torch.cat([piece.chunk(degree)[rank] for piece in rows.chunk(num_pieces)])


def run(engine: Engine, name: str, first: int = 0, last: int = STEPS) -> list[tuple[float, float]]:
    seen: list[events.StepEvent] = []
    unsubscribe = events.subscribe(seen.append, events.StepEvent)
    num_pieces = MICROBATCHES.get(name, 1)
    losses = [
        engine.step((part(inputs, engine, num_pieces), part(targets, engine, num_pieces)))
        for inputs, targets in MODELS[name][1][first:last]
    ]
    unsubscribe()
    return list(zip(losses, [one.grad_norm or 0.0 for one in seen], strict=True))


Case = tuple[str, int, Plan]
"""Which golden losses, for how many steps, and the plan that gives them."""


def train_all(cases: list[Case]) -> list[list[tuple[float, float]]]:
    return [run(engine_of(plan), name, 0, num_steps) for name, num_steps, plan in cases]


def check(world: World, num_ranks: int, cases: list[Case]) -> None:
    for results in world.run(train_all, cases, num_ranks=num_ranks, backend="torsh", timeout_s=200):
        for (name, num_steps, plan), found in zip(cases, results, strict=True):
            assert len(found) == num_steps
            for step, (mine, expected) in enumerate(zip(found, golden(name), strict=False), start=1):
                assert mine == pytest.approx(expected, abs=1e-4), (name, plan.mesh.equation, step)


TWICE = {"gradient_accumulation": 2}
"""Cuts a batch as the microbatches of a pipeline do."""


@pytest.mark.parametrize("num_steps", [FEW_STEPS, pytest.param(STEPS, marks=pytest.mark.matrix)])
def test_each_axis_with_all_experts_on_every_rank(world: World, num_steps: int) -> None:
    check(
        world,
        2,
        [
            (WHOLE, num_steps, plan_of(MeshConfig(tp=2))),
            (WHOLE, num_steps, plan_of(MeshConfig(cp=2))),
            (PIECES, num_steps, plan_of(MeshConfig(pp=2))),
            (WHOLE, FEW, plan_of(MeshConfig(tp=2), tensor=SPLIT)),
            (PIECES, FEW, plan_of(MeshConfig(pp=2), INTERLEAVED)),
        ],
    )


@pytest.mark.matrix
def test_experts_beside_each_other_axis_and_its_settings(world: World) -> None:
    check(
        world,
        4,
        [
            (WHOLE, STEPS, plan_of(MeshConfig(dp=1, ep=2, shard=2))),
            (WHOLE, STEPS, plan_of(MeshConfig(ep=2, tp=2))),
            (WHOLE, STEPS, plan_of(MeshConfig(ep=2, cp=2))),
            (PIECES, STEPS, plan_of(MeshConfig(ep=2, pp=2))),
            (WHOLE, FEW, plan_of(MeshConfig(dp=1, shard=2, cp=2))),
            (PIECES, FEW, plan_of(MeshConfig(dp=1, ep=2, shard=2), training=TWICE, activation=AGAIN)),
            (WHOLE, FEW, plan_of(MeshConfig(dp=1, ep=2, shard=2), fsdp={"strategy": "shard_grad_op"})),
            (PIECES, FEW, plan_of(MeshConfig(ep=2, tp=2), tensor=SPLIT, training=TWICE, activation=AGAIN)),
            (PIECES, FEW, plan_of(MeshConfig(ep=2, cp=2), training=TWICE, activation=AGAIN)),
            (PIECES, FEW, plan_of(MeshConfig(ep=2, pp=2), ZERO_BUBBLE)),
            (PIECES, FEW, plan_of(MeshConfig(dp=1, shard=2, pp=2), INTERLEAVED)),
            (PIECES, FEW, plan_of(MeshConfig(ep=2, pp=2), INTERLEAVED, activation=AGAIN)),
        ],
    )


@pytest.mark.matrix
def test_three_axes(world: World) -> None:
    check(
        world,
        8,
        [
            (WHOLE, STEPS, plan_of(MeshConfig(dp=2, ep=2, shard=2))),
            (WHOLE, FEW, plan_of(MeshConfig(dp=1, ep=2, shard=4))),
            (WHOLE, FEW, plan_of(MeshConfig(dp=1, ep=2, shard=2, tp=2))),
            (WHOLE, FEW, plan_of(MeshConfig(dp=2, ep=2, cp=2))),
            (PIECES, FEW, plan_of(MeshConfig(dp=1, ep=2, tp=2, pp=2), tensor=SPLIT)),
            (PIECES, FEW, plan_of(MeshConfig(dp=1, ep=2, shard=2, pp=2))),
            (PIECES, FEW, plan_of(MeshConfig(dp=1, ep=2, cp=2, pp=2))),
        ],
    )


def save_and_resume(plans: list[Plan]) -> list[list[tuple[float, float]]]:
    """Two steps under each plan, two more under the next; before them, the loss of the first batch is looked at."""
    states = []
    first = DataLoader(TensorDataset(*MODELS[WHOLE][1][0]), batch_size=BATCH)
    for plan in plans:
        engine = engine_of(plan)
        assert engine.evaluate(first) == pytest.approx(golden(WHOLE)[0][0], abs=1e-4), plan.mesh.equation
        run(engine, PIECES, 0, 2)
        states.append(engine.state_dict())
    found = []
    for index, plan in enumerate(plans):
        engine = engine_of(plan)
        engine.load_state_dict(states[index - 1])
        found.append(run(engine, PIECES, 2, 4))
    return found


def held(plan: Plan) -> tuple[float, float]:
    """The share of all expert weights, and of all others, that this rank holds, with their optimizer state."""
    engine = engine_of(plan)
    run(engine, PIECES, 0, 1)
    whole = {name: param.numel() for name, param in moe().named_parameters()}
    mine = {True: 0, False: 0}
    for name, param in engine.unwrapped.named_parameters():
        state = engine.optimizer.state[param]
        sizes = [local_part(one).numel() for one in (param, state["exp_avg"], state["exp_avg_sq"])]
        assert len(set(sizes)) == 1
        mine["feed_forward.experts." in name] += sizes[0]
    experts = sum(count for name, count in whole.items() if "feed_forward.experts." in name)
    return mine[True] / experts, mine[False] / (sum(whole.values()) - experts)


def rebalanced(plan: Plan) -> tuple[int, list[tuple[float, float]]]:
    """How many experts moved during four steps, of which each may move some, and what these steps gave."""
    engine = engine_of(plan, EXPERTS.replace(rebalance_threshold=0.001, rebalance_cooldown_steps=1))
    moves: list[events.RebalanceEvent] = []
    unsubscribe = events.subscribe(moves.append, events.RebalanceEvent)
    found = run(engine, PIECES, 0, 4)
    unsubscribe()
    return sum(move.num_moved for move in moves), found


def look_at_states(plans: list[Plan]) -> tuple[tuple[float, float], list[Any], list[list[tuple[float, float]]]]:
    return held(plans[0]), [rebalanced(plan) for plan in plans[1:3]], save_and_resume(plans)


@pytest.mark.matrix
def test_states_are_shared_out_move_with_experts_and_go_on_at_another_layout(world: World) -> None:
    plans = [
        plan_of(MeshConfig(dp=1, ep=2, shard=2), training=TWICE),
        plan_of(MeshConfig(ep=2, pp=2)),
        plan_of(MeshConfig(ep=2, tp=2), training=TWICE),
        plan_of(MeshConfig(dp=4), training=TWICE),
        plan_of(MeshConfig(ep=2, cp=2), training=TWICE),
        plan_of(MeshConfig(ep=4), training=TWICE),
    ]
    for shares, moves, results in world.run(look_at_states, plans, num_ranks=4, backend="torsh", timeout_s=200):
        assert shares == (0.25, pytest.approx(0.5, abs=0.02))
        for num_moved, found in moves:
            assert num_moved > 0
            for mine, expected in zip(found, golden(PIECES)[:4], strict=True):
                assert mine == pytest.approx(expected, abs=1e-4)
        for index, found in enumerate(results):
            for mine, expected in zip(found, golden(PIECES)[2:4], strict=True):
                assert mine == pytest.approx(expected, abs=1e-4), plans[index].mesh.equation


def lend_in_all(cases: list[Case]) -> list[tuple[bool, list[tuple[float, float]]]]:
    """Whether experts were lent, and losses and norms; every step decides again, and any gain is enough."""
    COPY_ROWS["cpu"] = 0
    found = []
    for name, num_steps, plan in cases:
        lent: list[events.LendingEvent] = []
        unsubscribe = events.subscribe(lent.append, events.LendingEvent)
        engine = engine_of(plan, EXPERTS.replace(hot_copies=1, rebalance_cooldown_steps=1))
        losses = run(engine, name, 0, num_steps)
        unsubscribe()
        found.append((any(any(event.borrowed) for event in lent), losses))
    return found


@pytest.mark.matrix
def test_experts_are_lent_beside_every_other_axis(world: World) -> None:
    """Also where layers run again in backward, and where a pipeline parts a backward in two."""
    cases = [
        (PIECES, FEW, plan_of(MeshConfig(dp=2, ep=2), training=TWICE, activation=AGAIN)),
        (PIECES, FEW, plan_of(MeshConfig(ep=2, tp=2), tensor=SPLIT, training=TWICE, activation=AGAIN)),
        (WHOLE, FEW, plan_of(MeshConfig(ep=2, cp=2))),
        (PIECES, FEW, plan_of(MeshConfig(ep=2, pp=2), INTERLEAVED, activation=AGAIN)),
        (PIECES, FEW, plan_of(MeshConfig(ep=2, pp=2), ZERO_BUBBLE)),
        (WHOLE, STEPS, plan_of(MeshConfig(ep=4))),
    ]
    by_rank = world.run(lend_in_all, cases, num_ranks=4, backend="torsh", timeout_s=200)
    for number, (name, _, plan) in enumerate(cases):
        assert any(results[number][0] for results in by_rank), plan.mesh.equation
        for results in by_rank:
            for step, (mine, expected) in enumerate(zip(results[number][1], golden(name), strict=False), start=1):
                assert mine == pytest.approx(expected, abs=1e-4), (name, plan.mesh.equation, step)
