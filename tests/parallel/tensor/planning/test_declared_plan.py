"""Plans that models declare: every style by name, heads that do not divide, overrides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.models.zoo import SPECIMENS, decoder
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.tensor import SplitStyle, TensorCut, find_tensor_plan
from torsh_distributed.parallel.tensor.planning.planned_rows import AttributeChange
from torsh_distributed.plan import TensorConfig

pytestmark = pytest.mark.needs_library("transformers")


def built(name: str) -> nn.Module:
    with torch.device("meta"):
        return SPECIMENS[name].build()


def test_a_declared_plan_is_followed() -> None:
    plan = find_tensor_plan(built("Qwen3"), tp=2)
    styles = {row.name.removeprefix("model.layers.1."): row.style.value for row in plan.modules if ".1." in row.name}
    assert styles == {
        "self_attn.q_proj": "column_local",
        "self_attn.k_proj": "column_local",
        "self_attn.v_proj": "column_local",
        "self_attn.o_proj": "row",
        "self_attn.q_norm": "shared",
        "self_attn.k_norm": "shared",
        "mlp.gate_proj": "column_local",
        "mlp.up_proj": "column_local",
        "mlp.down_proj": "row",
        "input_layernorm": "replicated",
        "post_attention_layernorm": "replicated",
    }
    assert plan.style_of("model.embed_tokens") is SplitStyle.VOCABULARY
    assert plan.style_of("lm_head") is SplitStyle.COLUMN_GATHERED
    assert plan.source == "declared by transformers"


def test_a_table_that_the_plan_leaves_out_is_split_where_sequences_are() -> None:
    model = built("Llama")
    model._tp_plan = {name: style for name, style in model._tp_plan.items() if "embed" not in name}  # type: ignore[union-attr, operator, assignment]  # a dict of transformers
    assert find_tensor_plan(model, tp=2).style_of("model.embed_tokens") is SplitStyle.REPLICATED
    plan = find_tensor_plan(model, tp=2, config=TensorConfig(sequence_parallel=True))
    assert plan.style_of("model.embed_tokens") is SplitStyle.VOCABULARY


def test_stacks_of_experts_are_cut_by_features_unless_another_axis_has_them() -> None:
    model = built("Mixtral")
    rows = {row.name: row for row in find_tensor_plan(model, tp=2).modules}
    assert rows["model.layers.0.mlp.experts"].style is SplitStyle.EXPERTS
    assert rows["model.layers.0.mlp.experts.gate_up_proj"].cut == TensorCut(1, (48, 48))
    assert rows["model.layers.0.mlp.experts.down_proj"].cut == TensorCut(2)
    spread = [f"model.layers.{number}.mlp.experts" for number in range(4)]
    left = find_tensor_plan(model, tp=2, spread=spread)
    assert left.style_of("model.layers.0.mlp.experts") is SplitStyle.REPLICATED
    assert left.style_of("model.layers.0.self_attn.q_proj") is SplitStyle.COLUMN_LOCAL


def test_shared_heads_that_do_not_divide_are_taken_by_the_queries_that_use_them() -> None:
    plan = find_tensor_plan(built("Llama"), tp=4)
    assert plan.style_of("model.layers.0.self_attn.k_proj") is SplitStyle.KEY_VALUE
    assert plan.style_of("model.layers.0.self_attn.q_proj") is SplitStyle.COLUMN_LOCAL
    assert AttributeChange("model.layers.0.self_attn", "num_key_value_groups", 1) in plan.attributes


def test_query_heads_that_do_not_divide_are_refused_with_what_would_fit() -> None:
    with pytest.raises(ConfigurationError, match=r"self_attn has 4 heads(.|\n)*choose tp from 1, 2, 4"):
        find_tensor_plan(built("Llama"), tp=3)


def test_overrides_of_the_plan_are_followed_and_checked() -> None:
    model = built("Llama")
    config = TensorConfig(overrides=("lm_head=replicated", "model.layers.*.mlp.*_proj=replicated"))
    plan = find_tensor_plan(model, tp=2, config=config)
    assert plan.style_of("lm_head") is plan.style_of("model.layers.3.mlp.up_proj") is SplitStyle.REPLICATED
    with pytest.raises(ConfigurationError, match=r"matches no module(.|\n)*did you mean"):
        find_tensor_plan(model, tp=2, config=TensorConfig(overrides=("lm_hed=row",)))
    with pytest.raises(ConfigurationError, match=r"no style 'colwize'(.|\n)*did you mean colwise"):
        find_tensor_plan(model, tp=2, config=TensorConfig(overrides=("lm_head=colwize",)))
    with pytest.raises(ConfigurationError, match="not of the form pattern=style"):
        TensorConfig(overrides=("lm_head",))


def test_a_style_that_is_not_known_is_refused_by_name() -> None:
    model = built("Llama")
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "diagonal"}
    with pytest.raises(ConfigurationError, match=r"up_proj: there is no style 'diagonal'"):
        find_tensor_plan(model, tp=2)


def test_what_is_tied_to_a_whole_table_stays_whole() -> None:
    with torch.device("meta"):
        model = decoder("Llama", tie_word_embeddings=True)()
    plan = find_tensor_plan(model, tp=2, overrides={"model.embed_tokens": "replicated"})
    assert plan.style_of("lm_head") is SplitStyle.REPLICATED


class Adapter(nn.Module):
    """A layer with a low-rank one beside it, under the names that PEFT gives them."""

    def __init__(self, base: nn.Linear, *, dropout: float = 0.0, scaled: bool = False) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout)})
        if scaled:
            self.lora_magnitude = nn.ParameterDict({"default": base.weight.detach().norm(dim=1)})

    def forward(self, x: Tensor) -> Tensor:
        down = self.lora_A["default"](self.lora_dropout["default"](x))
        out: Tensor = self.base_layer(x) + self.lora_B["default"](down)
        return out


class Block(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.up = Adapter(nn.Linear(8, 16), **options)  # type: ignore[arg-type]  # of Adapter
        self.down = Adapter(nn.Linear(16, 8), **options)  # type: ignore[arg-type]  # of Adapter


class Net(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))

    def torsh_anatomy(self) -> dict[str, object]:
        return {"tensor_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}


def test_the_parts_of_an_adapter_are_split_so_that_their_sum_fits() -> None:
    plan = find_tensor_plan(Net(), tp=2)
    styles = {row.name.removeprefix("blocks.0."): row.style.value for row in plan.modules if ".0." in row.name}
    assert styles == {
        "up.base_layer": "column_local",
        "up.lora_A.default": "replicated",
        "up.lora_B.default": "column_local",
        "down.base_layer": "row",
        "down.lora_A.default": "row",
        "down.lora_B.default": "replicated",
    }


def test_what_is_not_known_of_an_adapter_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"blocks\.0\.up: the adapter has dropout 0\.1(?s:.)*lora_dropout = 0"):
        find_tensor_plan(Net(dropout=0.1), tp=2)
    with pytest.raises(ConfigurationError, match=r"the adapter \(Adapter\) has lora_magnitude\.default"):
        find_tensor_plan(Net(scaled=True), tp=2)
    with pytest.raises(ConfigurationError, match="sequence_parallel does not support adapters"):
        find_tensor_plan(Net(), tp=2, config=TensorConfig(sequence_parallel=True))
