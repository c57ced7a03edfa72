"""Models cut into stages: the same function and names; models that cannot be cut are refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.reference import VOCABULARY, build
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.pipeline import StagePlan, split_into_stages


def through(plan: StagePlan, inputs: Tensor) -> Tensor:
    values: tuple[Tensor, ...] = (inputs,)
    for stage in plan.stages:
        out = plan.build(stage.index)(*values)
        values = out if isinstance(out, tuple) else (out,)
    return values[0]


@pytest.mark.parametrize("kind", ["gpt", "tied", "llama"])
def test_the_stages_together_are_the_model(kind: str) -> None:
    model = build(kind, num_layers=4)
    ids = torch.randint(VOCABULARY, (2, 16))
    for num_stages in (1, 2, 4, 6):
        plan = split_into_stages(model, num_stages)
        torch.testing.assert_close(through(plan, ids), model(ids), rtol=0, atol=0)
        names = set().union(*(plan.names(stage.index) for stage in plan.stages))
        assert names == set(model.state_dict())


def test_blocks_are_divided_evenly_and_an_embedding_costs_little() -> None:
    plan = split_into_stages(build("gpt", num_layers=4), 2)
    assert plan.stages[0].layers == ("token", "position", "blocks.0", "blocks.1")
    assert plan.stages[1].layers == ("blocks.2", "blocks.3", "norm", "head")
    assert plan.imbalance < 1.1
    assert split_into_stages(build("llama"), 2).tied == (((0, "embed_tokens.weight"), (1, "lm_head.weight")),)


def test_balance_by_parameters_by_time_and_by_hand() -> None:
    wide = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert split_into_stages(wide, 2, balance="parameters").stages[0].layers == ("0",)
    timed = split_into_stages(build("gpt", num_layers=4), 2, balance="time", example=(torch.zeros(4, 16).long(),))
    assert all(stage.cost > 0 for stage in timed.stages)
    manual = split_into_stages(wide, 3, balance="manual", split_points=("3", "1"))
    assert [stage.layers for stage in manual.stages] == [("0",), ("1", "2"), ("3",)]
    agreed = split_into_stages(wide, 2, agree=lambda costs: [1.0] * len(costs))
    assert agreed.stages[0].layers == ("0", "1")


def test_other_stages_are_freed() -> None:
    model = build("tied", num_layers=2)
    plan = split_into_stages(model, 2)
    plan.drop_others([1])
    assert model.head.weight.device.type == "cpu"
    assert {param.device.type for param in plan.build(0).parameters()} == {"meta"}


class Reading(nn.Module):
    """Its end reads weights of layers that come before."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.up, self.down = nn.Embedding(11, 4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.down(self.up(self.token(ids)).tanh())
        return nn.functional.linear(hidden, self.token.weight) + self.up.bias.square().sum()


def test_what_a_later_stage_reads_of_an_earlier_layer_stays_and_is_tied() -> None:
    model, ids = Reading(), torch.arange(6).view(2, 3)
    expected = model(ids)
    plan = split_into_stages(model, 2, balance="manual", split_points=("down",))
    assert plan.tied == (((0, "token.weight"), (1, "token.weight")), ((0, "up.bias"), (1, "up.bias")))
    torch.testing.assert_close(through(plan, ids), expected, rtol=0, atol=0)
    plan.drop_others([1])
    assert {name for name, param in plan.build(1).named_parameters() if param.is_meta} == set()
    assert model.up.weight.is_meta


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
            if hidden.sum() > 0:
                hidden = -hidden
        return hidden


class SaysItsLayers(Branching):
    def pipeline_layers(self) -> Sequence[nn.Module]:
        return list(self.layers)


class Measuring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        length = hidden.shape[0]
        return self.second(self.first(hidden)) / length


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(self.layer(hidden))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Branching(), r"the layers of Branching could not be traced(?s:.)*pipeline_layers\(\)"),
        (Measuring(), "is a number or a shape that a later stage needs"),
        (Twice(), "the layer layer runs more than once"),
    ],
)
def test_a_forward_that_cannot_be_cut_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        split_into_stages(model, 2)


def test_a_model_may_name_its_layers_itself() -> None:
    plan = split_into_stages(SaysItsLayers(), 2)
    assert [stage.layers for stage in plan.stages] == [("layers.0",), ("layers.1",)]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (("blocks.7",), "blocks.7 is not a layer at which a stage can start"),
        (("blocks.1", "norm"), "2 split points make 3 stages, but the plan needs 2"),
    ],
)
def test_wrong_split_points_are_refused(points: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        split_into_stages(build("gpt"), 2, balance="manual", split_points=points)


def test_an_uneven_cut_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        split_into_stages(build("gpt", num_layers=4), 3, balance="manual", split_points=("position", "norm"))
    assert "unbalanced" in caplog.text
    with pytest.raises(ConfigurationError, match='balance "time" measures the layers'):
        split_into_stages(build("gpt"), 2, balance="time")


class Watching(nn.Module):
    """Keeps what it computes: its own forward in an attribute, and in a buffer if it is told to."""

    def __init__(self, *, in_buffer: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.in_buffer, self.last = in_buffer, None

    def forward(self, values: Tensor) -> Tensor:
        hidden: Tensor = self.first(values)
        self.last = hidden
        if self.in_buffer:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(dim=0)
        return self.second(hidden)


def test_a_trace_leaves_nothing_in_the_model() -> None:
    model = Watching(in_buffer=False)
    split_into_stages(model, 2)
    assert model.last is None


def test_a_buffer_that_the_traced_forward_assigns_is_named() -> None:
    model = Watching(in_buffer=True)
    with pytest.raises(ConfigurationError, match="the forward of Watching assigns its buffer mean"):
        split_into_stages(model, 2)
    assert torch.equal(model.mean, torch.zeros(4))
