"""Losses and forwards that count their calls outside of the model, as a coefficient that is annealed does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

NUM_CALLS = 0


def annealed() -> Callable[[Tensor, Tensor], Tensor]:
    """By a variable around the loss, a list, and a global."""
    number, history = 0, {"losses": [0.0]}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        global NUM_CALLS
        nonlocal number
        number += 1
        NUM_CALLS += 1
        value = functional.mse_loss(outputs, targets)
        history["losses"].append(float(value.detach()))
        return value * number * len(history["losses"]) * NUM_CALLS / 8

    return loss


def make_model() -> nn.Module:
    """A hook counts what goes through its layer."""
    torch.manual_seed(2)
    model, counts = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), [0]

    def counted(_: Any, __: Any, outputs: Tensor) -> Tensor:
        counts[0] += 1
        return outputs * (1 + 0.1 * counts[0])

    model[0].register_forward_hook(counted)
    return model


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(3)]


def plain() -> list[float]:
    global NUM_CALLS
    NUM_CALLS = 0
    model, loss_fn, losses = make_model(), annealed(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for inputs, targets in make_batches():
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(plan: dict[str, Any]) -> list[float] | str:
    """The losses, or why it is refused, and the warnings of passes."""
    global NUM_CALLS
    NUM_CALLS = 0
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("torsh_distributed")
    log.addHandler(handler)
    try:
        engine = parallelize(
            make_model(), lambda params: torch.optim.SGD(params, lr=0.02), Plan(**plan), loss_fn=annealed()
        )
        losses = [engine.step(batch) for batch in engine.batches(make_batches(), epochs=1)]
    except ConfigurationError as error:
        return error.message
    finally:
        log.removeHandler(handler)
    return " ".join(said) if plan.get("training") else losses


def train_all() -> list[Any]:
    plans: list[dict[str, Any]] = [{}, {"mesh": {"shard": 2}}]
    parts = [{"training": {"gradient_accumulation": 2}}, {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}}]
    return [train(plan) for plan in plans + parts]


def test_what_counts_calls_is_not_moved_by_looking_at_it(world: World) -> None:
    expected = plain()
    for dp, shard, passes, pipeline in world.run(train_all, backend="torsh"):
        torch.testing.assert_close(dp, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(shard, expected, rtol=1e-4, atol=1e-6)
        assert "does not compute on mesh.pp 2" in pipeline
        assert not passes or "counts[0], the loss's NUM_CALLS, the loss's history['losses']" in passes
