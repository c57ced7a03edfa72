"""What a feed-forward module does between its layers decides whether ranks may keep features to themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from torsh_distributed.parallel.tensor import SplitStyle, find_tensor_plan

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
