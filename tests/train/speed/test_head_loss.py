"""`training.fused_loss`: the same losses as with whole logits, for our models and those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.bed.heavy_imports import TRANSFORMERS
from tests.bed.world import World
from tests.parallel.golden import MODELS, golden
from tests.parallel.sharded.test_module import Curve, train_all
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.speed.deferred_logits import DeferredLogits
from torsh_distributed.train.speed.head_loss import defer_logits, find_head

FUSED = {"training": {"fused_loss": True}}


def test_a_head_is_found_by_what_it_maps_to() -> None:
    found = find_head(MODELS["gpt"][0]())
    assert found is not None
    assert found[0] == "head"
    two = nn.ModuleDict({"table": nn.Embedding(9, 4), "one": nn.Linear(4, 9), "two": nn.Linear(4, 9)})
    assert find_head(two) is None
    two.get_output_embeddings = lambda: two["two"]  # type: ignore[assignment]
    assert find_head(two) == ("two", two["two"])


def test_a_model_without_a_head_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigurationError, match="no linear head") as caught:
        defer_logits(nn.Sequential(nn.Linear(4, 4)))
    assert "linear_cross_entropy(hidden, head.weight, targets)" in str(caught.value.hint)


def test_training_gives_the_losses_of_whole_logits(world: World) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("gpt", FUSED),
        ("gpt", {**FUSED, "mesh": {"dp": 1, "shard": 2}}),
        ("gpt", {"training": {"fused_loss": True, "gradient_accumulation": 2}, "mesh": {"dp": 1, "shard": 2}}),
    ]
    for curves in world.run(train_all, cases, num_ranks=2):
        assert_golden(curves, cases)


def assert_golden(curves: list[Curve], cases: list[tuple[str, dict[str, Any]]]) -> None:
    for (name, _), curve in zip(cases, curves, strict=True):
        for mine, expected in zip(curve, golden(name), strict=True):
            assert mine == pytest.approx(expected, rel=1e-4)


def llama_losses(is_fused: bool, padded: bool) -> tuple[list[float], bool]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )
    plan = Plan.from_dict({"training": {"fused_loss": is_fused, "gradient_clipping": 1.0}})
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    ids = torch.randint(61, (4, 12))
    labels = ids.masked_fill(torch.arange(12) >= 9, -100) if padded else ids
    batch = {"input_ids": ids, "labels": labels}
    losses = [engine.step(batch) for _ in range(4)]
    return losses, isinstance(model(**batch).logits, DeferredLogits)


def all_llama_losses() -> list[tuple[list[float], bool]]:
    return [llama_losses(is_fused, padded) for padded in (False, True) for is_fused in (False, True)]


@pytest.mark.needs_library("transformers")
def test_a_model_of_transformers_with_labels_gets_the_same_losses(world: World) -> None:
    plain, fused, plain_padded, fused_padded = world.run(all_llama_losses, num_ranks=1, imports=TRANSFORMERS)[0]
    assert fused[0] == pytest.approx(plain[0], abs=1e-5)
    assert fused_padded[0] == pytest.approx(plain_padded[0], abs=1e-5)
    assert (plain[1], fused[1]) == (False, True)
