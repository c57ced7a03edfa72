"""Frozen parameters and mixed dtypes train as in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bed.world import World
from tests.parallel.weights.checkpoints import gpt
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.demos.gpt import next_character_loss

SGD = functools.partial(torch.optim.SGD, lr=0.3)
Loss = Callable[[Any, Any], Tensor] | None
PLANS: dict[str, dict[str, Any]] = {"dp": {"dp": 2}, "shard": {"dp": 1, "shard": 2}, "tp": {"dp": 1, "tp": 2}}


def frozen() -> nn.Module:
    """A GPT of which only the norms, biases and the head learn."""
    model = gpt()
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name or name.endswith("bias") or name.startswith("head"))
    return model


def mixed() -> nn.Module:
    """Frozen layers in bf16 around trained ones in fp32, as adapters have them."""
    torch.manual_seed(4)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(16, 16).to(torch.bfloat16).requires_grad_(False)
            self.adapter = nn.Sequential(nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x.bfloat16()).float() + self.adapter(x)
            return out.square().mean()

    return Mixed()


def batches(kind: str) -> list[Any]:
    torch.manual_seed(9)
    if kind == "mixed":
        return list(torch.randn(4, 4, 16))
    ids = torch.randint(29, (4, 4, 13))
    return [(part[:, :-1], part[:, 1:]) for part in ids]


KINDS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "frozen": (frozen, next_character_loss),
    "mixed": (mixed, None),
}


def part_of(batch: Any, rank: int, degree: int) -> Any:
    return tuple(one[rank::degree] for one in batch) if isinstance(batch, tuple) else batch[rank::degree]


def trained(kind: str, names: list[str]) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    make, loss_fn = KINDS[kind]
    found = {}
    for name in names:
        engine = parallelize(make(), SGD, Plan(**PLANS[name]), loss_fn=loss_fn)
        rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
        losses = [engine.step(part_of(batch, rank, degree)) for batch in batches(kind)]
        found[name] = (losses, engine.state_dict()["model"])
    return found


def alone(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    make, loss_fn = KINDS[kind]
    model = make()
    optimizer = SGD(model.parameters())
    losses = []
    for batch in batches(kind):
        loss = loss_fn(model(batch[0]), batch[1]) if loss_fn is not None else model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(("kind", "names"), [("frozen", ["dp", "shard", "tp"]), ("mixed", ["dp", "shard"])])
def test_what_is_frozen_stays_and_the_rest_learns_as_alone(world: World, kind: str, names: list[str]) -> None:
    wanted, state = alone(kind)
    for found in world.run(trained, kind, names):
        for name, (losses, learned) in found.items():
            assert losses == pytest.approx(wanted, abs=1e-4), name
            for key, value in state.items():
                torch.testing.assert_close(learned[key], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
