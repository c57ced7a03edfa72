"""Models of transformers in stages and with split sequences: losses and gradient norms are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.bed.world import World
from tests.parallel.tiny_transformers import (
    BATCH,
    DECODERS,
    losses_alone,
    next_tokens,
    tiny,
    tiny_batches,
    token_loss,
)
from torsh_distributed import events
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.plan import ActivationConfig, ContextConfig, MeshConfig, PipelineConfig, Plan, TrainingConfig
from torsh_distributed.plan.sections.axes.pipeline import STAGES_PER_RANK
from torsh_distributed.train import Engine, parallelize

pytestmark = pytest.mark.needs_library("transformers")

STEPS = 5
Case = tuple[str, Plan, dict[str, Any]]
"""A model, a plan, and options: batches `padded` or with an `even` number of labels, `own` loss of the model or not."""


def plan_of(mesh: MeshConfig, **sections: Any) -> Plan:
    training = TrainingConfig(steps=STEPS, batch_size=BATCH, gradient_clipping=0.5, **sections.pop("training", {}))
    return Plan(mesh=mesh, training=training, **sections)


def schedule(name: str, num_microbatches: int = 4) -> PipelineConfig:
    return PipelineConfig(schedule=name, stages_per_rank=STAGES_PER_RANK[name][0], num_microbatches=num_microbatches)


def data(name: str, *, own: bool = True, **kind: bool) -> list[Any]:
    made = tiny_batches(name, STEPS, **kind)
    return made if own else [next_tokens(batch) for batch in made]


def rows_of(batch: Any, rows: slice) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[rows]
    if isinstance(batch, dict):
        return {key: rows_of(value, rows) for key, value in batch.items()}
    return tuple(rows_of(one, rows) for one in batch)


def engine_of(name: str, plan: Plan, *, own: bool = True) -> Engine:
    model = tiny(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return parallelize(model, optimizer, plan, loss_fn=None if own else token_loss)


def train(name: str, plan: Plan, *, own: bool = True, **kind: bool) -> list[float]:
    engine = engine_of(name, plan, own=own)
    seen: list[events.StepEvent] = []
    unsubscribe = events.subscribe(seen.append, events.StepEvent)
    out = []
    for batch in data(name, own=own, **kind):
        rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
        out.append(engine.step(rows_of(batch, slice(rank * BATCH // degree, (rank + 1) * BATCH // degree))))
    unsubscribe()
    return [value for loss, event in zip(out, seen, strict=True) for value in (loss, event.grad_norm or 0.0)]


def train_all(cases: list[Case]) -> list[list[float]]:
    return [train(name, plan, **options) for name, plan, options in cases]


def alone(cases: list[Case]) -> list[list[float]]:
    return [
        losses_alone(tiny(name), data(name, **options), loss_fn=None if options.get("own", True) else token_loss)
        for name, _, options in cases
    ]


def check(world: World, cases: list[Case], num_ranks: int) -> None:
    expected = world.run(alone, cases, num_ranks=1, timeout_s=110)[0]
    for results in world.run(train_all, cases, num_ranks=num_ranks, backend="torsh", timeout_s=110):
        for (name, plan, options), values, wanted in zip(cases, results, expected, strict=True):
            assert values == pytest.approx(wanted, abs=1e-4, rel=1e-4), (name, plan.mesh.equation, options)


PP = MeshConfig(dp=1, pp=2)
CP = MeshConfig(dp=1, cp=2)


def test_stages_keep_the_forward_of_the_model(world: World) -> None:
    check(
        world,
        [
            ("llama", plan_of(PP, pipeline=schedule("one_f_one_b")), {"padded": True}),
            ("gpt2", plan_of(PP, pipeline=schedule("zbv_zero_bubble")), {"own": False}),
            ("gemma3", plan_of(PP, pipeline=schedule("interleaved_one_f_one_b")), {}),
            ("bert", plan_of(PP, pipeline=schedule("gpipe"), activation=ActivationConfig(strategy="uniform")), {}),
            ("vit", plan_of(PP), {}),
        ],
        2,
    )


def test_sequences_are_split_through_the_attention_interface(world: World) -> None:
    check(
        world,
        [
            ("llama", plan_of(CP, context=ContextConfig(form="ring")), {"padded": True}),
            ("llama", plan_of(CP), {"padded": True, "own": False}),
            ("gemma2", plan_of(CP, context=ContextConfig(form="ring")), {}),
            ("mistral", plan_of(CP), {"padded": True}),
            ("gpt2", plan_of(CP), {}),
            ("bert", plan_of(CP, context=ContextConfig(form="ring")), {"padded": True}),
        ],
        2,
    )


def refusals() -> None:
    plan = plan_of(PP)
    engine = engine_of("llama", plan)
    batch = data("llama", padded=True)[0]
    with pytest.raises(InvalidArgument, match="LlamaForCausalLM computes its loss from labels, and the batch has none"):
        engine.step({"input_ids": batch["input_ids"]})
    engine = engine_of("llama", plan_of(CP))
    with pytest.raises(InvalidArgument, match="computes its loss from labels"):
        engine.step({"input_ids": batch["input_ids"]})
    with pytest.raises(FeatureNotAvailable, match=r"padded on the left(?s:.)*pad on the right"):
        engine.step({**batch, "attention_mask": batch["attention_mask"].flip(1)})
    with pytest.raises(FeatureNotAvailable, match="a mask of your own"):
        engine.step({**batch, "attention_mask": torch.ones(BATCH, 1, 16, 16)})
    with pytest.raises(FeatureNotAvailable, match="one label for a whole sequence"):
        engine.step({**batch, "labels": torch.zeros(BATCH, dtype=torch.long)})
    engine.step(batch)


def test_bad_batches_are_refused_on_every_rank(world: World) -> None:
    world.run(refusals, num_ranks=2, backend="torsh", timeout_s=60)


def look() -> list[float]:
    """Evaluation, the output on every rank, and the state of a pipeline loaded without one."""
    engine = engine_of("llama", plan_of(PP))
    batch = data("llama", padded=True)[0]
    engine.step(batch)
    short = {key: value[:3, :12] for key, value in batch.items()}
    value = engine.evaluate([short])
    whole = tiny("llama")
    whole.load_state_dict(engine.state_dict()["model"])
    whole.eval()
    engine.model.eval()
    with torch.no_grad():
        expected = whole(**short)
        found = engine.model(**short)
    torch.testing.assert_close(found["logits"], expected.logits, rtol=1e-4, atol=1e-5)
    other = data("llama")[1]
    engine.step({key: value[:4, :8] for key, value in other.items()})  # batches may change in shape
    return [value, expected.loss.item()]


def test_a_pipeline_evaluates_and_saves_as_the_model(world: World) -> None:
    for found, expected in world.run(look, num_ranks=2, backend="torsh", timeout_s=60):
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.matrix
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_schedule(world: World, num_ranks: int) -> None:
    """On four ranks with replicas, over which the Engine weighs samples: there every sample has as many labels."""
    mesh = MeshConfig(dp=num_ranks // 2, pp=2)
    names = ("llama", "gpt2", "gemma2", "opt", "mixtral", "bert", "qwen3")
    cases: list[Case] = [
        (
            model,
            plan_of(mesh, pipeline=schedule(name)),
            {"own": index % 2 == 0 or model == "bert", "even": num_ranks == 4},
        )
        for index, (model, name) in enumerate(zip(names, STAGES_PER_RANK, strict=True))
    ]
    check(world, cases, num_ranks)


@pytest.mark.matrix
@pytest.mark.parametrize("axis", ["pp", "cp"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_model(world: World, axis: str, num_ranks: int) -> None:
    names = [*DECODERS, "bert", "vit"] if axis == "pp" else [*DECODERS, "bert"]
    mesh = MeshConfig(**{"dp": 1, axis: num_ranks})
    forms = ("ring", "ulysses")
    check(
        world,
        [
            (name, plan_of(mesh, context=ContextConfig(form=forms[index % 2])), {"padded": name != "vit"})
            for index, name in enumerate(names)
        ],
        num_ranks,
    )


@pytest.mark.matrix
def test_with_other_axes(world: World) -> None:
    check(
        world,
        [
            ("llama", plan_of(MeshConfig(dp=1, pp=2, cp=2)), {"padded": True}),
            ("qwen3", plan_of(MeshConfig(dp=1, pp=2, cp=2), context=ContextConfig(form="ring")), {"own": False}),
            ("gpt2", plan_of(MeshConfig(dp=1, shard=2, cp=2)), {"own": False, "even": True}),
            ("llama", plan_of(MeshConfig(dp=1, pp=2, shard=2)), {"even": True}),
            ("llama", plan_of(MeshConfig(dp=1, pp=2, tp=2)), {"padded": True}),
            ("llama", plan_of(MeshConfig(dp=1, cp=2, tp=2)), {"padded": True}),
        ],
        4,
    )


def holds_its_own() -> None:
    engine = engine_of("llama", plan_of(MeshConfig(dp=1, pp=2)))
    held = sum(param.numel() for group in engine.optimizer.param_groups for param in group["params"])
    assert held < 0.75 * sum(param.numel() for param in tiny("llama").parameters())
    assert all(isinstance(param, nn.Parameter) for param in engine.model.parameters())


@pytest.mark.matrix
def test_a_rank_holds_its_own_stage_only(world: World) -> None:
    world.run(holds_its_own, num_ranks=2, backend="torsh", timeout_s=60)
