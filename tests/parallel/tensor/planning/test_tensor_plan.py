"""The plan: found by names, printable, overridable, refused with the numbers."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from torch import nn

from tests.parallel.reference import build
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.tensor import SplitStyle, TensorCut, find_tensor_plan
from torsh_distributed.plan import TensorConfig


def test_the_demo_model_is_split_by_heads_features_and_vocabulary() -> None:
    plan = find_tensor_plan(build("gpt"), tp=2)
    styles = {row.name: row.style.value for row in plan.modules if "blocks.1" not in row.name}
    assert styles == {
        "token": "vocabulary",
        "position": "replicated",
        "blocks.0.attention_norm": "replicated",
        "blocks.0.query_key_value": "column",
        "blocks.0.projection": "row",
        "blocks.0.feed_forward_norm": "replicated",
        "blocks.0.feed_forward.0": "column_local",
        "blocks.0.feed_forward.2": "row",
        "norm": "replicated",
        "head": "column_gathered",
    }
    fused = next(row for row in plan.modules if row.name == "blocks.0.query_key_value")
    assert fused.cut == TensorCut(0, (32, 32, 32))


def test_a_gated_grouped_query_model_is_found_too() -> None:
    plan = find_tensor_plan(build("llama"), tp=2)
    assert {name: plan.style_of(f"layers.0.{name}").value for name in ("q_proj", "v_proj", "o_proj")} == {
        "q_proj": "column",
        "v_proj": "column",
        "o_proj": "row",
    }
    assert plan.style_of("layers.1.mlp.gate_proj") is SplitStyle.COLUMN_LOCAL
    assert plan.style_of("lm_head") is SplitStyle.COLUMN_GATHERED


def test_the_table_shows_shapes_before_and_after() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(find_tensor_plan(build("gpt"), tp=2).describe())
    lines = console.export_text().splitlines()
    assert any("query_key_value" in line and "96 × 32" in line and "48 × 32" in line for line in lines)
    assert any("token" in line and "29 × 32" in line and "15 × 32" in line and "14 × 32" in line for line in lines)


def test_sequence_and_loss_parallelism_show_in_the_plan() -> None:
    config = TensorConfig(sequence_parallel=True, loss_parallel=True)
    plan = find_tensor_plan(build("gpt"), tp=2, config=config)
    assert plan.style_of("norm") is plan.style_of("position") is SplitStyle.SEQUENCE
    assert plan.style_of("head") is SplitStyle.COLUMN


def test_an_override_wins_over_what_was_found() -> None:
    plan = find_tensor_plan(
        build("gpt"), tp=2, overrides={"blocks.*.feed_forward.*": "replicated", "token": "replicated"}
    )
    assert plan.style_of("blocks.1.feed_forward.0") is plan.style_of("token") is SplitStyle.REPLICATED
    assert plan.style_of("blocks.1.projection") is SplitStyle.ROW


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"block.*": "row"}, r"overrides\['block.\*'\] matches no module"),
        ({"head": "rows"}, "there is no style 'rows'"),
        ({"norm": "row"}, "norm is a LayerNorm, which cannot be split as 'row'"),
        ({"head": "vocabulary"}, "head is a Linear, which cannot be split as 'vocabulary'"),
    ],
)
def test_a_wrong_override_is_refused(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_tensor_plan(build("gpt"), tp=2, overrides=overrides)


def test_heads_that_do_not_divide_are_refused_with_what_would_fit() -> None:
    with pytest.raises(ConfigurationError, match=r"mesh.tp 3: blocks.0 has 4 heads.*(?s:.)*choose tp from 1, 2, 4"):
        find_tensor_plan(build("gpt"), tp=3)
    with pytest.raises(ConfigurationError, match=r"4 heads with 2 key-value heads(?s:.)*choose tp from 1, 2,"):
        find_tensor_plan(build("llama"), tp=4)


def test_unknown_heads_are_refused_until_overridden() -> None:
    model = build("gpt")
    for block in model.blocks:
        del block.num_heads
    with pytest.raises(ConfigurationError, match=r"the number of heads of blocks\.0 is not known"):
        find_tensor_plan(model, tp=2)
    whole = dict.fromkeys(("blocks.*.query_key_value", "blocks.*.projection"), "replicated")
    assert find_tensor_plan(model, tp=2, overrides=whole).style_of("blocks.0.projection") is SplitStyle.REPLICATED


def test_a_model_without_known_layers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="found no layer that tensor parallelism can split"):
        find_tensor_plan(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), tp=2)
