"""Models of transformers in stages and with split sequences: losses and gradient norms are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bed.heavy_imports import INDUCTOR, TRANSFORMERS
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
from torsh_distributed.plan import (
    ActivationConfig,
    CompileConfig,
    ContextConfig,
    MeshConfig,
    PipelineConfig,
    Plan,
    TrainingConfig,
)
from torsh_distributed.plan.sections.mesh import STAGES_PER_RANK
from torsh_distributed.train import Engine, parallelize

pytestmark = [
    pytest.mark.needs_library("transformers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),  # inductor's own imports
]

STEPS = 5
Case = tuple[str, Plan, dict[str, Any]]
"""A model, a plan, and options: batches `padded` or with an `even` number of labels, `own` loss of the model or not,
`changes` to its config."""


def plan_of(mesh: MeshConfig, **sections: Any) -> Plan:
    training = TrainingConfig(steps=STEPS, batch_size=BATCH, gradient_clipping=0.5, **sections.pop("training", {}))
    return Plan(mesh=mesh, training=training, **sections)


def schedule(name: str, num_microbatches: int = 4) -> PipelineConfig:
    return PipelineConfig(schedule=name, stages_per_rank=STAGES_PER_RANK[name][0], num_microbatches=num_microbatches)


def data(name: str, *, own: bool = True, num_steps: int = STEPS, **kind: bool) -> list[Any]:
    made = tiny_batches(name, num_steps, **kind)
    return made if own else [next_tokens(batch) for batch in made]


def rows_of(batch: Any, rows: slice) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[rows]
    if isinstance(batch, dict):
        return {key: rows_of(value, rows) for key, value in batch.items()}
    return tuple(rows_of(one, rows) for one in batch)


def engine_of(name: str, plan: Plan, *, own: bool = True, changes: dict[str, Any] | None = None) -> Engine:
    model = tiny(name, **(changes or {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return parallelize(model, optimizer, plan, loss_fn=None if own else token_loss)


def train(
    name: str, plan: Plan, *, own: bool = True, changes: dict[str, Any] | None = None, **kind: Any
) -> list[float]:
    engine = engine_of(name, plan, own=own, changes=changes)
    seen: list[events.StepEvent] = []
    unsubscribe = events.subscribe(seen.append, events.StepEvent)
    out = []
    for batch in data(name, own=own, **kind):
        rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
        out.append(engine.step(rows_of(batch, slice(rank * BATCH // degree, (rank + 1) * BATCH // degree))))
    unsubscribe()
    return [value for loss, event in zip(out, seen, strict=True) for value in (loss, event.grad_norm or 0.0)]


def alone(name: str, options: dict[str, Any]) -> list[float]:
    loss_fn = None if options.get("own", True) else token_loss
    kind = {key: value for key, value in options.items() if key != "changes"}
    return losses_alone(tiny(name, **options.get("changes", {})), data(name, **kind), loss_fn=loss_fn)


def compare(cases: list[Case]) -> None:
    """Train every case on the ranks, and in one process: each rank does so with some of the cases."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {n: alone(cases[n][0], cases[n][2]) for n in range(rank, len(cases), size)})
    expected = {number: values for one in gathered for number, values in one.items()}
    for number, (name, plan, options) in enumerate(cases):
        found = train(name, plan, **options)
        assert found == pytest.approx(expected[number], abs=1e-4, rel=1e-4), (name, plan.mesh.equation, options)


def check(world: World, cases: list[Case], num_ranks: int) -> None:
    world.run(compare, cases, num_ranks=num_ranks, backend="torsh", timeout_s=110, imports=TRANSFORMERS)


SELECTED = ActivationConfig(strategy="selective")
RECOMPUTED = ActivationConfig(strategy="uniform", every_n_layers=1)
PP = MeshConfig(dp=1, pp=2)
CP = MeshConfig(dp=1, cp=2)


STAGES: list[Case] = [
    ("llama", plan_of(PP, pipeline=schedule("one_f_one_b")), {"padded": True}),
    ("gpt2", plan_of(PP, pipeline=schedule("zbv_zero_bubble")), {"own": False}),
    ("gemma3", plan_of(PP, pipeline=schedule("interleaved_one_f_one_b")), {}),
    ("bert", plan_of(PP, pipeline=schedule("gpipe"), activation=ActivationConfig(strategy="uniform")), {}),
    ("vit", plan_of(PP), {}),
]
SPLIT: list[Case] = [
    ("llama", plan_of(CP, context=ContextConfig(form="ring")), {"padded": True}),
    ("mistral", plan_of(CP), {"padded": True}),
    ("llama", plan_of(CP), {"padded": True, "own": False}),
    ("gemma2", plan_of(CP, context=ContextConfig(form="ring")), {}),
    ("gpt2", plan_of(CP), {}),
    ("bert", plan_of(CP, context=ContextConfig(form="ring")), {"padded": True}),
]


@pytest.mark.matrix
@pytest.mark.parametrize("cases", [STAGES, SPLIT], ids=["stages", "split sequences"])
def test_losses_and_norms_are_those_of_one_process(world: World, cases: list[Case]) -> None:
    check(world, cases, 2)


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


def look() -> None:
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
    assert value == pytest.approx(expected.loss.item(), abs=1e-4)


def short_form() -> None:
    """One world for all of it."""
    compare([(name, plan, {**options, "num_steps": 2}) for name, plan, options in (*STAGES[:3], *SPLIT[:2])])
    refusals()
    look()


@pytest.mark.matrix
def test_stages_and_split_sequences_in_short(world: World) -> None:
    """Losses of one process, bad batches refused on every rank, evaluation and state of a pipeline."""
    world.run(short_form, num_ranks=2, backend="torsh", timeout_s=100, imports=TRANSFORMERS)


@pytest.mark.matrix
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", STAGES_PER_RANK)
def test_every_schedule(world: World, name: str, num_ranks: int) -> None:
    """Two models on every schedule, over all ranks; on two ranks with the loss of the model and of the user."""
    sizes = {"llama": {"num_hidden_layers": 8}, "gpt2": {"n_layer": 8}}
    plan = plan_of(MeshConfig(dp=1, pp=num_ranks), pipeline=schedule(name, 8))
    check(
        world,
        [
            (model, plan, {"own": model == "llama", "changes": changes, "padded": model == "llama"})
            for model, changes in sizes.items()
        ],
        num_ranks,
    )


@pytest.mark.matrix
def test_schedules_with_replicas(world: World) -> None:
    """The Engine weighs samples over replicas: there every sample has as many labels."""
    names = ("llama", "gpt2", "gemma2", "opt", "mixtral", "bert", "qwen3")
    cases: list[Case] = [
        (
            model,
            plan_of(MeshConfig(dp=2, pp=2), pipeline=schedule(name)),
            {"own": index % 2 == 0 or model == "bert", "even": True},
        )
        for index, (model, name) in enumerate(zip(names, STAGES_PER_RANK, strict=True))
    ]
    check(world, cases, 4)


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


PAIRS: list[Case] = [
    ("llama", plan_of(MeshConfig(dp=1, pp=2, cp=2)), {"padded": True}),
    ("qwen3", plan_of(MeshConfig(dp=1, pp=2, cp=2), context=ContextConfig(form="ring")), {"own": False}),
    ("gpt2", plan_of(MeshConfig(dp=1, shard=2, cp=2)), {"own": False, "even": True}),
    ("llama", plan_of(MeshConfig(dp=1, pp=2, shard=2)), {"even": True}),
    ("llama", plan_of(MeshConfig(dp=1, pp=2, tp=2)), {"padded": True}),
    ("llama", plan_of(MeshConfig(dp=1, cp=2, tp=2)), {"padded": True}),
    ("llama", plan_of(MeshConfig(dp=2, cp=2)), {"even": True}),
    ("llama", plan_of(MeshConfig(dp=2, shard=2)), {"even": True}),
    ("mixtral", plan_of(MeshConfig(dp=1, pp=2, ep=2)), {"even": True}),
    ("mixtral", plan_of(MeshConfig(dp=1, cp=2, ep=2)), {"even": True}),
]
"""With `models/test_split_models` and the schedules with replicas: every two axes."""


@pytest.mark.matrix
@pytest.mark.parametrize("number", range(0, len(PAIRS), 5))
def test_with_other_axes(world: World, number: int) -> None:
    check(world, PAIRS[number : number + 5], 4)


COMPILED: dict[str, tuple[str, MeshConfig, dict[str, Any]]] = {
    "replicas": ("llama", MeshConfig(dp=2), {}),
    "shards": ("llama", MeshConfig(dp=1, shard=2), {}),
    "shards, some operations kept": (
        "llama",
        MeshConfig(dp=1, shard=2),
        {"activation": SELECTED},
    ),
    "replicas, layers recomputed": ("llama", MeshConfig(dp=2), {"activation": RECOMPUTED}),
    "tensor": ("llama", MeshConfig(dp=1, tp=2), {}),
    "tensor, layers recomputed": ("gpt2", MeshConfig(dp=1, tp=2), {"activation": RECOMPUTED}),
    "pipeline": ("gpt2", MeshConfig(dp=1, pp=2), {}),
    "pipeline, layers recomputed": ("llama", MeshConfig(dp=1, pp=2), {"activation": RECOMPUTED}),
    "experts": ("mixtral", MeshConfig(dp=1, ep=2), {}),
}


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_layers(world: World, case: str) -> None:
    """Code that inductor generates, which takes minutes on a busy machine."""
    name, mesh, sections = COMPILED[case]
    plan = plan_of(mesh, compile=CompileConfig(enabled=True), **sections)
    layers = {"n_layer": 2} if name == "gpt2" else {"num_hidden_layers": 2}
    cases = [(name, plan, {"even": True, "num_steps": 2, "changes": layers})]
    imports = (*TRANSFORMERS, *INDUCTOR)
    world.run(compare, cases, num_ranks=2, backend="torsh", timeout_s=400, imports=imports)


def holds_its_own() -> None:
    engine = engine_of("llama", plan_of(MeshConfig(dp=1, pp=2)))
    held = sum(param.numel() for group in engine.optimizer.param_groups for param in group["params"])
    assert held < 0.75 * sum(param.numel() for param in tiny("llama").parameters())
    assert all(isinstance(param, nn.Parameter) for param in engine.model.parameters())


@pytest.mark.matrix
def test_a_rank_holds_its_own_stage_only(world: World) -> None:
    world.run(holds_its_own, num_ranks=2, backend="torsh", timeout_s=60, imports=TRANSFORMERS)
