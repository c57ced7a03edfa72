"""Weights that users look at and change between updates: under every plan those of one process."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torsh_distributed as td
from tests.bed.world import World

STEPS = 4
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}},
    "ZeRO-1": {"mesh": {"shard": 2}, "fsdp": {"strategy": "shard_optimizer"}},
    "ZeRO-3": {"mesh": {"shard": 2}},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}},
}
Weights = MutableMapping[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Chain(nn.Module):
    """Its head is the table of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.blocks = nn.Embedding(11, 16), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 11)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.token(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def made() -> Chain:
    torch.manual_seed(0)
    return Chain()


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(11, (STEPS, 8, 6), generator=torch.Generator().manual_seed(1))
    return [(one, (one * 3 + 1) % 11) for one in tokens]


def limit_norms(weights: Weights) -> None:
    for value in weights.values():
        value.mul_(0.98).div_(value.norm().clamp(min=1.0))


def begin_anew(weights: Weights) -> None:
    nn.init.normal_(weights["blocks.0.up.weight"], std=0.1, generator=torch.Generator().manual_seed(7))


def write_rows(weights: Weights) -> None:
    weights["token.weight"][0].fill_(0.01)
    weights["blocks.1.down.weight"][:, :3] = 0.0


CHANGES: dict[str, Callable[[Weights], None]] = {
    "norms": limit_norms,
    "initialised": begin_anew,
    "rows": write_rows,
}


def in_one_process(name: str) -> list[float]:
    model, losses = made(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for tokens, targets in batches():
        loss = loss_fn(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            CHANGES[name](dict(model.named_parameters()))
    return losses


def with_whole_weights(sections: dict[str, Any], name: str) -> list[float]:
    model, losses = made(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = td.parallelize(model, optimizer, td.Plan(**sections, training={"steps": STEPS}), loss_fn=loss_fn)
    for batch in engine.batches(batches()):
        losses.append(engine.step(batch))
        with engine.whole_weights(change=True) as weights:
            CHANGES[name](weights)
            if td.rank() == 1:
                weights["token.weight"].zero_()  # the first rank's count
    return losses


def all_changes(sections: dict[str, Any]) -> dict[str, list[float]]:
    return {name: with_whole_weights(sections, name) for name in CHANGES}


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_changed_is_changed_as_in_one_process(world: World, plan: str) -> None:
    for found in world.run(all_changes, PLANS[plan], num_ranks=2, backend="torsh"):
        for name, losses in found.items():
            assert losses == pytest.approx(in_one_process(name), rel=1e-5), name


def norms_and_refusals(sections: dict[str, Any]) -> tuple[list[str], float, list[str]]:
    model, said = made(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = td.parallelize(model, optimizer, td.Plan(**sections, training={"steps": 1}), loss_fn=loss_fn)
    with engine.whole_weights("blocks.*.up.weight") as weights:
        names, norm = list(weights), sum(float(value.norm()) for value in weights.values())
    for patterns, change in ((("blocks.0.up.bias",), False), (("block.*",), True)):
        try:
            with engine.whole_weights(*patterns, change=change) as weights:
                weights["blocks.0.up.bias"].zero_()
        except td.TorshError as error:
            said.append(str(error))
    batch = batches()[0]
    engine.backward(engine.forward(batch))
    with pytest.raises(td.TorshError, match="comes between two updates"):
        engine.whole_weights()
    engine.discard_update()
    return names, norm, said


@pytest.mark.parametrize("plan", ["dp", "ZeRO-3", "tp"])
def test_weights_are_chosen_by_name_and_only_looked_at(world: World, plan: str) -> None:
    expected = sum(block.up.weight.norm().item() for block in made().blocks)
    for names, norm, (unchanged, unknown) in world.run(norms_and_refusals, PLANS[plan], num_ranks=2, backend="torsh"):
        assert names == ["blocks.0.up.weight", "blocks.1.up.weight"]
        assert norm == pytest.approx(expected)
        assert "blocks.0.up.bias was changed" in unchanged
        assert "change=True" in unchanged
        assert "no weight has such a name" in unknown


def with_new_data(sections: dict[str, Any]) -> list[float]:
    model, losses = made(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = td.parallelize(model, optimizer, td.Plan(**sections, training={"steps": STEPS}), loss_fn=loss_fn)
    for batch in engine.batches(batches()):
        losses.append(engine.step(batch))
        for param in engine.unwrapped.parameters():
            param.data = param.data * 0.9
    return losses


@pytest.mark.parametrize("plan", ["dp", "ZeRO-1", "tp"])
def test_tensors_that_take_the_place_of_others_are_trained(world: World, plan: str) -> None:
    model, expected = made(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for tokens, targets in batches():
        loss = loss_fn(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
        for param in model.parameters():
            param.data = param.data * 0.9
    for losses in world.run(with_new_data, PLANS[plan], num_ranks=2, backend="torsh"):
        assert losses == pytest.approx(expected, rel=1e-5)


def with_pieces_changed(axis: str, what: str) -> None:
    pipeline = {"pipeline": {"num_microbatches": 2}} if axis == "pp" else {}
    model, plan = made(), td.Plan(mesh={axis: 2}, training={"steps": 3}, **pipeline)
    engine = td.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=loss_fn)
    for batch in engine.batches(batches()[:3]):
        for piece in engine.microbatches(batch):
            engine.backward(engine.forward(piece))
        if what == "gradients":
            nn.utils.clip_grad_norm_(engine.unwrapped.parameters(), 0.1)
        engine.apply()
        with torch.no_grad():
            for param in engine.unwrapped.parameters():
                param.div_(param.norm())


@pytest.mark.parametrize(
    ("axis", "what", "said"),
    [
        ("tp", "parameters", "parameters were changed between two updates, and under mesh.tp rank"),
        ("tp", "gradients", "gradients were changed between backward() and apply(), and under mesh.tp rank"),
        ("pp", "gradients", "gradients were changed between backward() and apply(), and under mesh.pp rank"),
    ],
)
def test_who_changes_pieces_is_refused(world: World, axis: str, what: str, said: str) -> None:
    for outcome in world.outcomes(with_pieces_changed, axis, what, num_ranks=2, backend="torsh"):
        assert isinstance(outcome.error, td.TorshError)
        assert said in str(outcome.error)


def with_own_changes(path: str) -> list[float]:
    """What the Engine changes itself is no script's change."""
    model, plan = made(), td.Plan(mesh={"tp": 2}, training={"steps": 3, "gradient_clipping": 0.5})
    engine = td.parallelize(model, torch.optim.AdamW(model.parameters()), plan, loss_fn=loss_fn)
    losses = []
    for step, batch in enumerate(batches()):
        losses.append(engine.step(batch))
        if step == 0:
            engine.save(path)
        engine.load(path, step=1)
        with engine.whole_weights("norm.*", "blocks.0.norm.*", change=True):
            pass
        engine.evaluate([batch])
    return losses


def test_what_the_engine_changes_itself_is_taken(world: World, tmp_path: Path) -> None:
    for losses in world.run(with_own_changes, str(tmp_path), num_ranks=2, backend="torsh"):
        assert len(losses) == STEPS
