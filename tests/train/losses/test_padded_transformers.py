"""Padded batches of transformers' models: on every axis the losses of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bed.heavy_imports import TRANSFORMERS
from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

pytestmark = pytest.mark.needs_library("transformers")

STEPS, ROWS, LENGTH = 3, 8, 16
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "bert": ("BertForMaskedLM", BERT),
    "tags": ("BertForTokenClassification", {**BERT, "num_labels": 5}),
    "classes": ("BertForSequenceClassification", {**BERT, "num_labels": 5}),
    "answers": ("BertForQuestionAnswering", BERT),
    "bart": ("BartForConditionalGeneration", BART),
    "moe": (
        "Qwen3MoeForCausalLM",
        {**GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


def make_model(name: str, **config: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    kind, options = MODELS[name]
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**options, **config))


def make_batches(name: str) -> list[dict[str, Tensor]]:
    """Rows of very different lengths; in the last step no label of the second half counts."""
    torch.manual_seed(1)
    batches = []
    for step in range(STEPS):
        ids = torch.randint(3, 64, (ROWS, LENGTH))
        mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
        labels = ids % 5 if name == "tags" else ids.clone()
        for row in range(ROWS):
            end = 2 + (row * row + step) % (LENGTH - 1)
            mask[row, end:] = 0
            labels[row, end:] = -100
        if step == STEPS - 1:
            labels[ROWS // 2 :] = -100
        batch = {"input_ids": ids, "attention_mask": mask}
        if name == "classes":
            batch["labels"] = torch.arange(ROWS) % 5
            batch["labels"][: step + 2] = -100
        elif name == "answers":
            batch["start_positions"] = torch.arange(ROWS) + LENGTH * (torch.arange(ROWS) < step)
            batch["end_positions"] = batch["start_positions"] + 1
        else:
            batch["labels"] = labels
        batches.append(batch)
    return batches


def plain(name: str) -> list[float]:
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in make_batches(name):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(name: str, plan: dict[str, Any], config: dict[str, Any] | None = None) -> list[float]:
    model = make_model(name, **(config or {}))
    training = {"steps": STEPS, "batch_size": ROWS, "gradient_accumulation": plan.get("accumulation", 1)}
    rest = {key: value for key, value in plan.items() if key != "accumulation"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = parallelize(model, optimizer, Plan(training=training, **rest))
    return [engine.step(batch) for batch in engine.batches(make_batches(name))]


PLANS: dict[str, dict[str, Any]] = {
    "dp": {},
    "passes": {"accumulation": 2},
    "shard": {"mesh": {"shard": 2}},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 4}},
    "cp": {"mesh": {"cp": 2}},
    "ep": {"mesh": {"ep": 2}},
    "four": {"mesh": {"dp": 2, "pp": 2}, "pipeline": {"num_microbatches": 2}, "accumulation": 2},
    "long": {"mesh": {"dp": 2, "cp": 2}},
}
QUICK = [
    ("llama", "dp"),
    ("llama", "passes"),
    ("llama", "shard"),
    ("bert", "dp"),
    ("classes", "dp"),
    ("answers", "dp"),
    ("moe", "ep"),
]
REFUSED = [("answers", "pp")]
ALL = [
    (model, plan)
    for model in MODELS
    for plan in PLANS
    if (plan != "ep" or model == "moe")
    and (model in ("llama", "moe", "bert", "tags") or plan not in ("cp", "long"))
    and (model != "bart" or plan not in ("pp", "four"))
    and (model != "answers" or plan not in ("pp", "four"))
]


def check(world: World, model: str, plan: str) -> None:
    [expected] = world.run(plain, model, num_ranks=1, imports=TRANSFORMERS)
    num_ranks = 4 if plan in ("four", "long") else 2
    for losses in world.run(train, model, PLANS[plan], num_ranks=num_ranks, imports=TRANSFORMERS):
        assert losses == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(("model", "plan"), QUICK)
def test_padded_batches_have_the_losses_of_one_process(world: World, model: str, plan: str) -> None:
    check(world, model, plan)


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "plan"), [case for case in ALL if case not in QUICK])
def test_padded_batches_of_every_model_on_every_axis(world: World, model: str, plan: str) -> None:
    check(world, model, plan)


def test_two_means_in_a_pipeline_are_refused(world: World) -> None:
    with pytest.raises(ConfigurationError, match=r"training\.loss_is"):
        world.run(train, "answers", PLANS["pp"], imports=TRANSFORMERS)


@pytest.mark.parametrize("plan", ["dp", "passes", "shard", "ep"])
def test_a_load_balancing_loss_of_part_of_a_batch_is_refused(world: World, plan: str) -> None:
    with pytest.raises(ConfigurationError, match="output_router_logits"):
        world.run(train, "moe", PLANS[plan], {"output_router_logits": True}, imports=TRANSFORMERS)
