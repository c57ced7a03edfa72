"""The plan: found by names, printable, overridable, refused with the numbers."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

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


Between = Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    def __init__(self, between: Between, inner: nn.Module | None = None, *, is_quiet: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.between = between
        self.inner = inner or nn.Identity()
        if is_quiet:
            nn.init.zeros_(self.down.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down(self.inner(self.between(self.up(hidden))))
        return out


class Scaled(FeedForward):
    """A parameter that every feature is multiplied with: its gradient is a sum over all of them."""

    def __init__(self) -> None:
        super().__init__(functional.gelu)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden * self.scale)


def style(model: nn.Module) -> SplitStyle:
    return find_tensor_plan(nn.Sequential(model), tp=2).style_of("0.up")


def centred(hidden: Tensor) -> Tensor:
    return hidden - hidden.mean(dim=-1, keepdim=True)


@pytest.mark.parametrize("between", [functional.gelu, torch.relu, lambda hidden: hidden.clamp(-1, 1) ** 2])
def test_features_that_are_computed_alone_stay_on_their_rank(between: Between) -> None:
    assert style(FeedForward(between)) is SplitStyle.COLUMN_LOCAL
    assert style(FeedForward(between, is_quiet=True)) is SplitStyle.COLUMN_LOCAL


@pytest.mark.parametrize(
    "between",
    [
        centred,
        lambda hidden: functional.rms_norm(hidden, hidden.shape[-1:]),
        lambda hidden: functional.layer_norm(hidden, (32,)),
        lambda hidden: hidden.softmax(dim=-1),
        lambda hidden: functional.gelu(hidden) + hidden.flip(-1),
        lambda hidden: hidden.view(*hidden.shape[:-1], 8, 4).sum(dim=-1).repeat(1, 1, 4),
    ],
)
def test_features_that_are_computed_together_are_gathered(between: Between) -> None:
    assert style(FeedForward(between)) is SplitStyle.COLUMN_GATHERED
    assert style(FeedForward(between, is_quiet=True)) is SplitStyle.COLUMN_GATHERED


@pytest.mark.parametrize("model", [FeedForward(functional.gelu, nn.LayerNorm(32)), Scaled()])
def test_parameters_between_the_layers_need_all_features(model: nn.Module) -> None:
    assert style(model) is SplitStyle.COLUMN_GATHERED


@pytest.mark.parametrize("wrap", [weight_norm, spectral_norm, nn.utils.spectral_norm])
def test_a_layer_whose_weight_is_computed_stays_whole_and_as_it_was(wrap: Callable[[nn.Module], nn.Module]) -> None:
    computed, plain = FeedForward(functional.gelu), FeedForward(functional.gelu)
    wrap(computed.up)
    wrap(computed.down)
    before = {name: value.clone() for name, value in computed.state_dict().items()}
    plan = find_tensor_plan(nn.Sequential(computed, plain), tp=2)
    assert (plan.style_of("0.up"), plan.style_of("1.up")) == (SplitStyle.REPLICATED, SplitStyle.COLUMN_LOCAL)
    for name, value in computed.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_module_that_takes_more_than_a_tensor_is_split_by_its_names() -> None:
    class Two(FeedForward):
        def forward(self, hidden: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(hidden + other)

    assert style(Two(functional.gelu)) is SplitStyle.COLUMN_LOCAL


def test_an_embedding_is_whole_if_what_has_its_weight_is() -> None:
    """A head whose name and place do not show that it is one would compute with a piece of the vocabulary."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
            )
            self.last.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.words(ids)
            for block in self.blocks:
                hidden = hidden + block(hidden)
            return self.last(hidden).transpose(1, 2)

    plan = find_tensor_plan(Tied(), tp=2)
    assert plan.style_of("words") is plan.style_of("last") is SplitStyle.REPLICATED
    assert plan.style_of("blocks.0.0") is SplitStyle.COLUMN_LOCAL
