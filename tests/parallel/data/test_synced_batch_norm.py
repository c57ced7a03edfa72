"""BatchNorm over the samples of all ranks against one process."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.BatchNorm2d(6, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 1),
    )


def make_batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    batches = [(torch.randn(7, 2, 4, 4) + step, torch.randn(7, 1)) for step in range(4)]
    return [*batches, (batches[0][0][:2], batches[0][1][:2])]  # three ranks: one has no sample of its own


def plain() -> tuple[list[float], dict[str, Tensor]]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for inputs, targets in make_batches():
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def train(plan: dict[str, object]) -> tuple[list[float], dict[str, Tensor]]:
    model = make_model()
    training = {"steps": 5, "batch_size": 7, "sync_batch_norm": True, "exactly_once": True}
    engine = parallelize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        Plan(training=training, **plan),  # type: ignore[arg-type]
        loss_fn=functional.mse_loss,
    )
    losses = [engine.step(batch) for batch in engine.batches(_Replayed(make_batches()))]
    return losses, engine.state_dict()["model"]


class _Replayed(list):  # type: ignore[type-arg]
    """Batches with a position, as `exactly_once` asks for."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(("num_ranks", "plan"), [(2, {}), (3, {}), (2, {"mesh": {"shard": 2}})])
def test_losses_and_running_statistics_are_those_of_one_process(
    world: World, num_ranks: int, plan: dict[str, object]
) -> None:
    expected, state = plain()
    for losses, found in world.run(train, plan, num_ranks=num_ranks):
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def train_without() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torsh_distributed.train.losses").addHandler(handler)
    model = make_model()
    parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan(), loss_fn=functional.mse_loss)
    return messages


def test_statistics_of_each_rank_alone_are_warned_of(world: World) -> None:
    [first, second] = world.run(train_without)
    assert second == []
    assert len(first) == 1
    assert "2 BatchNorm layers (1, …)" in first[0]
    assert "training.sync_batch_norm" in first[0]
