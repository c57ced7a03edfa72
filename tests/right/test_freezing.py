"""Layers that are frozen and unfrozen while a model trains, as in transfer learning: the losses of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import torsh_distributed as td
from tests.bed.world import World
from torsh_distributed.train import DistributedOptimizer

STEPS = 6
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}},
    "two passes": {"mesh": {"dp": 2}, "training": {"gradient_accumulation": 2}},
    "searched": {"mesh": {"dp": 2}, "ddp": {"find_unused_parameters": True}},
    "ZeRO-1": {"mesh": {"shard": 2}, "fsdp": {"strategy": "shard_optimizer"}},
    "ZeRO-3": {"mesh": {"shard": 2}},
}


class Scaled(nn.Module):
    """Two layers, and a number that no plan shards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, values: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(values))) * self.scale


def made() -> Scaled:
    torch.manual_seed(0)
    model = Scaled()
    for param in (*model.first.parameters(), model.scale):
        param.requires_grad_(False)
    return model


def change(model: Any, step: int) -> None:
    """Unfreezes before step 2, and freezes others before step 4."""
    if step == 2:
        for param in (*model.first.parameters(), model.scale):
            param.requires_grad_(True)
    if step == 4:
        model.second.requires_grad_(False)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(STEPS)]


def in_one_process() -> list[float]:
    model, losses = made(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, (inputs, targets) in enumerate(batches()):
        change(model, step)
        loss = functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def engine_losses(sections: dict[str, Any]) -> list[float]:
    model = made()
    plan = td.Plan(**{**sections, "training": {"steps": STEPS, **sections.get("training", {})}})
    engine = td.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5), plan, loss_fn=functional.mse_loss)
    losses = []
    for step, batch in enumerate(engine.batches(batches())):
        change(engine.unwrapped, step)
        losses.append(engine.step(batch))
    return losses


def wrapper_losses() -> list[float]:
    """A loop of torch's own, around the wrapper alone."""
    model = td.DistributedDataParallel(made())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    half = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    for step, (inputs, targets) in enumerate(batches()):
        change(model.module, step)
        loss = functional.mse_loss(model(inputs[half]), targets[half])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(td.all_reduce(loss.detach(), op="mean").item())
    return losses


def everything() -> dict[str, list[float]]:
    return {**{name: engine_losses(sections) for name, sections in PLANS.items()}, "wrapper": wrapper_losses()}


def test_layers_are_frozen_and_unfrozen_between_steps(world: World) -> None:
    expected = in_one_process()
    for found in world.run(everything, num_ranks=2, backend="torsh"):
        for name, losses in found.items():
            assert losses == pytest.approx(expected, rel=1e-5), name


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
def test_a_plan_that_cannot_follow_says_so(world: World, mesh: dict[str, int]) -> None:
    pipeline = {"pipeline": {"num_microbatches": 2}} if "pp" in mesh else {}
    for outcome in world.outcomes(engine_losses_of_a_chain, {"mesh": mesh, **pipeline}, num_ranks=2, backend="torsh"):
        assert isinstance(outcome.error, td.TorshError)
        assert "was changed after parallelize()" in str(outcome.error)


def test_what_compression_carries_over_belongs_to_the_first_buckets(world: World) -> None:
    sections = {**PLANS["dp"], "compress": {"method": "topk:0.5"}}
    for outcome in world.outcomes(engine_losses, sections, num_ranks=2, backend="torsh"):
        assert isinstance(outcome.error, td.TorshError)
        assert "requires_grad of parameters was changed, and what compression carries over" in str(outcome.error)


def engine_losses_of_a_chain(sections: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*layers)
    model.requires_grad_(False)
    for layer in layers:
        layer.linear2.requires_grad_(True)
    plan = td.Plan(**sections, training={"steps": 2})
    engine = td.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=functional.mse_loss)
    values = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))
    for batch in engine.batches([(values, values)] * 2):
        engine.step(batch)
        engine.unwrapped.requires_grad_(True)


def with_a_new_head() -> None:
    model = made()
    plan = td.Plan(mesh={"dp": 2}, training={"steps": STEPS})
    engine = td.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5), plan, loss_fn=functional.mse_loss)
    for batch in engine.batches(batches()):
        engine.step(batch)
        engine.unwrapped.second = nn.Linear(8, 4)
        engine.optimizer.add_param_group({"params": list(engine.unwrapped.second.parameters())})


def test_a_layer_that_the_model_gets_later_is_refused(world: World) -> None:
    for outcome in world.outcomes(with_a_new_head, num_ranks=2, backend="torsh"):
        assert isinstance(outcome.error, td.TorshError)
        assert "shape (4, 8) that the model did not have" in str(outcome.error)


def with_a_wrapped_optimizer() -> None:
    model = made()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for step, (inputs, targets) in enumerate(batches()):
        change(model, step)
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_wrapped_optimizer_refuses_what_was_unfrozen_later(world: World) -> None:
    for outcome in world.outcomes(with_a_wrapped_optimizer, num_ranks=2, backend="torsh"):
        assert isinstance(outcome.error, td.TorshError)
        assert "was unfrozen or added after the optimizer was wrapped" in str(outcome.error)
