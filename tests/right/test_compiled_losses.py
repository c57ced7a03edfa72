"""Compiled models that compute their own loss over labels that only they know: the losses of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize

NUM_STEPS, ROWS, WORDS = 3, 8, 32
PLANS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "layers": {"enabled": True, "scope": "layers"},
    "model": {"enabled": True, "scope": "model"},
}


class Selecting(nn.Module):
    """A third of the positions count, unevenly over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.head = nn.Linear(16, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        labels = torch.where(words % 3 == 0, words * 7 % WORDS, -100)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


COMPILED: dict[str, Callable[[Selecting], Any]] = {
    "by the plan": lambda model: model,
    "wrapped": torch.compile,
    "in place": lambda model: model.compile() or model,  # type: ignore[func-returns-value]  # compiles it itself
}


def made() -> tuple[Selecting, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = Selecting()
    return model, [{"words": torch.randint(0, WORDS, (ROWS, 6))} for _ in range(NUM_STEPS)]


def alone() -> list[float]:
    model, batches = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_ranks(how: str, section: dict[str, Any]) -> list[float]:
    model, batches = made()
    model = COMPILED[how](model)
    plan = Plan.model_validate({"mesh": {"dp": 2}, "compile": section, "training": {"steps": NUM_STEPS}})
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5), plan)
    return [engine.step(piece) for piece in engine.batches(batches)]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("how", "section"), [*(("by the plan", one) for one in PLANS), ("wrapped", "as it is"), ("in place", "as it is")]
)
def test_a_count_inside_a_graph_weighs_the_ranks(world: World, how: str, section: str) -> None:
    for losses in world.run(on_ranks, how, PLANS[section], num_ranks=2):
        assert losses == pytest.approx(alone(), rel=1e-5)
