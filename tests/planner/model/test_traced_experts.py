"""Experts of transformers in a trace: counted in every format, and the model is as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torsh_distributed.plan import Plan
from torsh_distributed.planner.model.profiling import profile_model

pytestmark = [pytest.mark.needs_library("transformers"), pytest.mark.slow]

WIDTH, INNER, EXPERTS, CHOSEN, LENGTH = 64, 96, 8, 2, 32


def mixtral() -> Any:
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=LENGTH,
    )
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_operations_of_experts_are_counted_at_even_load(dtype: str) -> None:
    model = mixtral()
    kinds = [type(module) for module in model.modules()]
    profile = profile_model(model, Plan(precision={"dtype": dtype}))
    products = [row for row in profile.blocks[0].forward_rows if row.name == "_grouped_mm"]
    # A gate and a widening layer in one product, and one that narrows.
    assert sum(row.count * row.flops.at(1) for row in products) == 2 * LENGTH * CHOSEN * WIDTH * 3 * INNER
    assert (len(profile.blocks), profile.num_blocks, profile.num_experts) == (1, 3, EXPERTS)
    assert [type(module) for module in model.modules()] == kinds


def test_bf16_keeps_half_of_what_fp32_keeps_of_experts() -> None:
    kept = {}
    for dtype in ("fp32", "bf16"):
        block = profile_model(mixtral(), Plan(precision={"dtype": dtype})).blocks[0]
        kept[dtype] = sum(one.per_sample for one in block.saved.values())
    assert kept["bf16"] < 0.75 * kept["fp32"]
