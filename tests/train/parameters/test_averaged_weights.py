"""What scripts do to optimizers and weights between steps: start the state again, keep a moving average."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from tests.bed.world import World
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.engine import Engine

STEPS = 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def make_batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(STEPS)]


def plain(*, starts_again: bool) -> tuple[list[float], nn.Module]:
    """One process and torch alone; the losses, and the mean of the weights after each step."""
    model = make_model()
    optimizer, averaged = torch.optim.Adam(model.parameters(), lr=0.05), AveragedModel(model)
    losses = []
    for inputs, targets in make_batches():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        averaged.update_parameters(model)
        losses.append(loss.item())
        if starts_again:
            optimizer.state.clear()
    return losses, averaged.module


def make_engine(model: nn.Module, **plan: Any) -> Engine:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return parallelize(model, optimizer, Plan(training={"steps": STEPS}, **plan), loss_fn=functional.cross_entropy)


def start_again(how: str) -> list[float]:
    engine = make_engine(make_model(), mesh={"dp": 2}, offload={"enabled": True})
    losses = []
    for batch in engine.batches(make_batches()):
        losses.append(engine.step(batch))
        if how == "cleared":
            engine.optimizer.state.clear()
        elif how == "replaced":
            engine.optimizer.state = defaultdict(dict)
        else:
            for param in [*engine.optimizer.state]:
                engine.optimizer.state[param] = {}
    return losses


def average() -> list[Tensor]:
    model = make_model()
    averaged = copy.deepcopy(model)
    engine = make_engine(model, mesh={"shard": 2})
    with pytest.raises(FeatureNotAvailable, match=r"engine\.whole_weights\(\)"):
        AveragedModel(engine.unwrapped)
    for number, batch in enumerate(engine.batches(make_batches())):
        engine.step(batch)
        with engine.whole_weights() as weights, torch.no_grad():
            for name, param in averaged.named_parameters():
                param.lerp_(weights[name], 1 / (number + 1))
    return [param.detach() for param in averaged.parameters()]


def average_of_replicas() -> list[Tensor]:
    engine = make_engine(make_model(), mesh={"dp": 2})
    with pytest.raises(FeatureNotAvailable, match=r"engine\.unwrapped"):
        AveragedModel(engine.model)
    averaged = AveragedModel(engine.unwrapped)
    for batch in engine.batches(make_batches()):
        engine.step(batch)
        averaged.update_parameters(engine.model)
    return [param.detach() for param in averaged.module.parameters()]


def refusals_of_whole_averages() -> list[str]:
    """An average that was made before the model was split, with each way to split it."""
    plans: list[dict[str, Any]] = [
        {"mesh": {"shard": 2}},
        {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}},
        {"mesh": {"dp": 2}, "offload": {"enabled": True}},
    ]
    said = []
    for plan in plans:
        model = make_model()
        averaged = AveragedModel(model)
        engine = make_engine(model, **plan)
        for one in (engine.unwrapped, engine.model):
            with pytest.raises(InvalidArgument, match=r"engine\.whole_weights\(\)") as refused:
                averaged.update_parameters(one)
        said.append(str(refused.value))
    return said


def run_all() -> tuple[list[list[float]], list[list[Tensor]], list[str]]:
    return (
        [start_again(how) for how in ("cleared", "replaced", "one by one")],
        [average(), average_of_replicas()],
        (refusals_of_whole_averages()),
    )


@pytest.mark.ranks
def test_state_that_starts_again_and_averages_of_weights_are_those_of_one_process(world: World) -> None:
    again, _ = plain(starts_again=True)
    _, averaged = plain(starts_again=False)
    expected = [param.detach() for param in averaged.parameters()]
    for by_way, averages, refusals in world.run(run_all):
        assert all(losses == pytest.approx(again, rel=1e-5) for losses in by_way)
        torch.testing.assert_close(averages, [expected, expected])
        for text, setting in zip(refusals, ("mesh.shard", "mesh.pp", "offload"), strict=True):
            assert setting in text
