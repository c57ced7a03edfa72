"""Before the first step a split model is compared with one process: equal, or refused with what to write."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from tests.train.comparing.odd_models import MODELS, batches, losses_alone, made
from torsh_distributed.checkpoint.random_generators import random_state
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.expert import MoELayer, auxiliary_loss
from torsh_distributed.plan import ExpertConfig, MeshConfig, PipelineConfig, Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.losses.engine_loss import StepSetting

AXES = ("tp", "pp", "cp")


def plan_for(axis: str) -> Plan:
    if axis == "shard × tp":
        return Plan(mesh=MeshConfig(dp=1, shard=2, tp=2))
    pipeline = {"pipeline": PipelineConfig(num_microbatches=2)} if axis == "pp" else {}
    return Plan(mesh=MeshConfig(dp=1, **{axis: 2}), **pipeline)


def outcome(name: str, axis: str) -> list[float] | str:
    """The losses of five steps on two ranks, or the refusal."""
    model, loss_fn = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        engine = parallelize(model, optimizer, plan_for(axis), loss_fn=loss_fn)
        return [engine.step(batch) for batch in batches(name)]
    except ConfigurationError as error:
        return str(error)


def outcomes(cases: list[tuple[str, str]]) -> list[list[float] | str]:
    return [outcome(*case) for case in cases]


def run(world: World, cases: list[tuple[str, str]], *, num_ranks: int = 2) -> dict[tuple[str, str], str]:
    """The refusals; everything else must be equal to one process."""
    refused: dict[tuple[str, str], str] = {}
    for results in world.run(outcomes, cases, num_ranks=num_ranks, backend="torsh", timeout_s=100):
        for case, result in zip(cases, results, strict=True):
            if isinstance(result, str):
                refused[case] = result
            else:
                assert result == pytest.approx(losses_alone(case[0]), abs=1e-4), case
    return refused


def test_a_feed_forward_part_that_mixes_features_is_equal_on_tensor_ranks(world: World) -> None:
    names = ["centred", "rms_norm", "layer_norm", "scaled", "weight_norm", "spectral_norm"]
    assert run(world, [(name, "tp") for name in names]) == {}


def test_what_a_sharded_model_has_gathered_is_left_alone(world: World) -> None:
    """It is freed in between: writing it back would end the process."""
    assert run(world, [("plain", "shard × tp")], num_ranks=4) == {}


def test_what_mixes_positions_is_refused_by_name(world: World) -> None:
    said = run(world, [(name, "cp") for name in ("plain", "convolution", "shifted", "waves", "last_token", "own_loss")])
    assert "blocks.0.mix (Convolution) mixes positions" in said["convolution", "cp"]
    assert "blocks.0.mix (Mixed) mixes positions" in said["shifted", "cp"]
    assert "the forward of Waves mixes positions" in said["waves", "cp"]
    assert "its modules agree, but the loss is" in said["last_token", "cp"]
    assert "a loss must be a mean over positions" in said["last_token", "cp"]
    assert ("plain", "cp") not in said
    assert all("set mesh.cp = 1" in one for one in said.values())


def losses_without_first_labels(is_split: bool) -> list[float]:
    """The first ranks' rows of the first batch have no label."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(mesh=MeshConfig(dp=2, tp=2) if is_split else MeshConfig(), training={"steps": 3})
    engine = parallelize(model, optimizer, plan, loss_fn=masked_by_hand)
    tokens = torch.randint(9, (8, 4), generator=torch.Generator().manual_seed(1))
    labels = (tokens + 1) % 9
    labels[:5] = -100
    return [engine.step(batch) for batch in engine.batches([(tokens, labels)] * 3)]


def masked_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    mask = (labels != -100).float()
    return -(picked * mask).sum() / mask.sum().clamp(min=1)


def test_rows_with_labels_are_compared_if_another_rank_has_them(world: World) -> None:
    (expected,) = world.run(losses_without_first_labels, False, num_ranks=1)
    for outcome in world.outcomes(losses_without_first_labels, True, num_ranks=4, backend="torsh", timeout_s=100):
        assert outcome.value == pytest.approx(expected, rel=1e-5), outcome
        assert "without being compared" not in outcome.output


def test_a_loss_that_reads_parameters_is_refused_where_ranks_hold_parts_of_them(world: World) -> None:
    said = run(world, [("decayed", axis) for axis in AXES])
    assert said.keys() == {("decayed", "tp"), ("decayed", "pp")}
    for one in said.values():
        assert "the loss reads " in one
        assert "of which a rank holds a part only" in one
        assert "weight_decay" in one


@pytest.mark.matrix
@pytest.mark.parametrize("first", range(0, len(MODELS), 7))
@pytest.mark.parametrize("axis", AXES)
def test_every_odd_model_is_equal_or_refused(world: World, axis: str, first: int) -> None:
    names = list(MODELS)[first : first + 7]
    said = run(world, [(name, axis) for name in names])
    mixing = {"convolution", "shifted", "summed", "meaned", "recurrent", "by_hand", "multihead", "prefixed", "waves"}
    # Of the two means of smooth_loss one leaves padding out, so that no weight of a microbatch fits both.
    several = {"decayed", "smooth_loss"}
    refused = {"tp": {"decayed"}, "pp": several, "cp": mixing | {"pooled", "last_token", "smooth_loss"}}
    # Own losses know nothing of what counts on other ranks.
    assert {name for name, _ in said} - {"own_loss"} == refused[axis] & set(names)


class Experts(nn.Module):
    """A layer of experts with a capacity that drops tokens; `decay`: its loss reads their parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        config = ExpertConfig(num_experts=4, num_experts_per_token=1, capacity_factor=0.5)
        self.first, self.experts, self.last = nn.Linear(8, 8), MoELayer(8, 16, config), nn.Linear(8, 8)

    def forward(self, values: Tensor) -> Tensor:
        hidden: Tensor = self.first(values)
        return self.last(hidden + self.experts(hidden))


def expert_losses(decay: float, mesh: MeshConfig | None) -> list[float] | str:
    model = Experts()

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.mse_loss(outputs, targets) + auxiliary_loss(model)
        return loss + decay * sum(param.pow(2).sum() for param in model.parameters()) if decay else loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(1))
    if mesh is None:
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_fn(model(values), values.flip(-1))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses
    engine = parallelize(model, optimizer, Plan(mesh=mesh), loss_fn=loss_fn)
    place = slice(engine.strategy.data_rank * 4, engine.strategy.data_rank * 4 + 4)
    try:
        return [engine.step((values[place], values.flip(-1)[place])) for _ in range(3)]
    except ConfigurationError as error:
        return str(error)


def test_experts_that_are_spread_are_compared_too(world: World) -> None:
    mesh = MeshConfig(dp=1, ep=2)
    equal, *_ = world.run(expert_losses, 0.0, mesh, num_ranks=2, backend="torsh", timeout_s=60)
    assert equal == pytest.approx(expert_losses(0.0, None), abs=1e-5)
    refused, *_ = world.run(expert_losses, 1e-2, mesh, num_ranks=2, backend="torsh", timeout_s=60)
    assert "the loss reads experts.experts." in str(refused)


class Changing(nn.Module):
    """Changes parameters, buffers, attributes and random numbers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.num_calls = 0

    def forward(self, values: Tensor) -> Tensor:
        self.num_calls += 1
        self.mean = self.mean + 1
        self.down.bias.data = self.down.bias.data / 2
        noise = torch.rand(()) * (1 if self.training else 0)
        return values + self.down(functional.dropout(self.norm(self.up(values)), 0.5, self.training)) + noise


def first_forward(axis: str) -> list[str]:
    """What the comparison of a model that changes itself left behind: names."""
    torch.manual_seed(3)
    model = nn.Sequential(Changing(), Changing())
    plan = plan_for(axis)
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=functional.mse_loss)
    held = engine.unwrapped.state_dict(keep_vars=True)
    before = {name: value.detach().clone() for name, value in held.items()}
    numbers = random_state()
    comparison, engine.comparison = engine.comparison, None
    assert comparison is not None
    values = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    setting = StepSetting(engine.strategy, engine.precision, engine.device, False)
    comparison.run(engine.loss, setting, (values, values.flip(1)))
    after = engine.unwrapped.state_dict(keep_vars=True)
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    changed += [name for name, value in after.items() if value is not held[name] or value.grad is not None]
    changed += [name for name in ("cpu", "python") if str(random_state()[name]) != str(numbers[name])]
    changed += ["num_calls" for one in engine.unwrapped.modules() if getattr(one, "num_calls", 0)]
    changed += ["training" for one in engine.unwrapped.modules() if not one.training]
    return changed


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_the_comparison_leaves_everything_as_it_was(world: World, axis: str) -> None:
    assert world.run(first_forward, axis, num_ranks=2, backend="torsh", timeout_s=60) == [[], []]


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies of this")


def warnings_of_a_model_that_cannot_be_copied() -> list[str]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), Uncopied(8, 8))
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torsh_distributed").addHandler(handler)
    engine = parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), plan_for("tp"), loss_fn=functional.mse_loss
    )
    engine.step((torch.ones(4, 8), torch.zeros(4, 8)))
    logging.getLogger("torsh_distributed").removeHandler(handler)
    return said


def test_a_model_that_cannot_be_compared_trains_with_a_warning(world: World) -> None:
    said = world.run(warnings_of_a_model_that_cannot_be_copied, num_ranks=2, backend="torsh", timeout_s=60)
    reason = "it cannot be copied (no copies of this)"
    assert said == [[f"Sequential is trained without being compared with one process first: {reason}"], []]
