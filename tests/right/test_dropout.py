"""Dropout cannot be equal on another number of ranks; its rules can be tested, and that a resume draws the same.

Ranks have one mask where they have the same activations, others where they have other samples, positions or features.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.comm.groups import process_group
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "dp": (2, {"mesh": {"dp": 2}}),
    "shard": (2, {"mesh": {"shard": 2}}),
    "tp": (2, {"mesh": {"tp": 2}}),
    "sequences on tp": (2, {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}}),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}}),
    "cp": (2, {"mesh": {"cp": 2}}),
    "dp × tp": (4, {"mesh": {"dp": 2, "tp": 2}}),
    "recomputed": (2, {"mesh": {"dp": 2}, "activation": {"strategy": "uniform", "every_n_layers": 1}}),
}
VOCABULARY, LENGTH, WIDTH = 19, 8, 16


class Dropping(nn.Module):
    """Drops half of what it gets by a function, which its attributes do not show, and keeps the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        dropped = functional.dropout(hidden, 0.5, self.training)
        local = dropped.to_local() if hasattr(dropped, "to_local") else dropped
        self.masks.append(local.detach() == 0)
        return dropped


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), Dropping()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.inner(self.up(hidden).sigmoid()))  # of a sigmoid nothing is zero by itself


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed_forward, self.outer = nn.LayerNorm(WIDTH), FeedForward(), Dropping()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.outer(self.feed_forward(self.norm(hidden)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def made(plan: str, *, seed: int | None = 3) -> Engine:
    """None: from the numbers that the process draws next."""
    if seed is not None:
        torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return parallelize(model, optimizer, Plan(**PLANS[plan][1]), loss_fn=loss_fn)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The same rows on every rank, so that masks can be compared."""
    ids = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(step))
    return ids, (ids * 3 + 1) % VOCABULARY


Mask = list[bool]


def masks(plan: str, *, is_seeded_by_rank: bool) -> dict[str, list[Mask]]:
    """What each part of the model has dropped in two steps, on this rank."""
    torch.manual_seed(process_group.rank() if is_seeded_by_rank else 5)
    engine = made(plan, seed=None)
    engine.step(batch(0))
    for module in engine.unwrapped.modules():
        if isinstance(module, Dropping):
            module.masks.clear()  # those of the comparison too
    for step in (1, 2):
        engine.step(batch(step))
    return {
        name: [mask.flatten().tolist() for mask in module.masks]
        for name, module in engine.unwrapped.named_modules()
        if isinstance(module, Dropping)
    }


def by_rank(world: World, plan: str, *, is_seeded_by_rank: bool) -> list[dict[str, list[Mask]]]:
    found = world.run(
        partial(masks, is_seeded_by_rank=is_seeded_by_rank),
        plan,
        num_ranks=PLANS[plan][0],
        backend="torsh",
        timeout_s=60,
    )
    for one in found:
        drawn = [tuple(mask) for each in one.values() for mask in each]
        assert len(set(drawn)) == len(drawn), "no mask is drawn twice"
    return found


@pytest.mark.parametrize("is_seeded_by_rank", [False, True], ids=["one seed", "a seed for each rank"])
@pytest.mark.parametrize("plan", ["dp", "shard", "cp"])
def test_ranks_with_other_samples_or_positions_drop_others(world: World, plan: str, is_seeded_by_rank: bool) -> None:
    first, second = by_rank(world, plan, is_seeded_by_rank=is_seeded_by_rank)
    assert first.keys() == second.keys()
    for name in first:
        assert all(one != other for one, other in zip(first[name], second[name], strict=True)), name


@pytest.mark.parametrize("is_seeded_by_rank", [False, True], ids=["one seed", "a seed for each rank"])
def test_tensor_ranks_drop_the_same_of_whole_activations_and_others_of_pieces(
    world: World, is_seeded_by_rank: bool
) -> None:
    first, second = by_rank(world, "tp", is_seeded_by_rank=is_seeded_by_rank)
    for name in first:
        is_whole = name.endswith("outer")
        assert all((one == other) == is_whole for one, other in zip(first[name], second[name], strict=True)), name


def test_tensor_ranks_with_pieces_of_a_sequence_drop_others(world: World) -> None:
    first, second = by_rank(world, "sequences on tp", is_seeded_by_rank=False)
    for name in first:
        assert all(one != other for one, other in zip(first[name], second[name], strict=True)), name


def test_stages_drop_others(world: World) -> None:
    first, second = by_rank(world, "pp", is_seeded_by_rank=False)
    drawn = [{tuple(mask) for each in one.values() for mask in each} for one in (first, second)]
    assert not drawn[0] & drawn[1]


def test_replicas_of_tensor_ranks_do_both(world: World) -> None:
    found = by_rank(world, "dp × tp", is_seeded_by_rank=False)
    for name in found[0]:
        different = {tuple(map(tuple, one[name])) for one in found}
        assert len(different) == (2 if name.endswith("outer") else 4), name


def resumed(plan: str, folder: Path) -> tuple[list[float], list[float]]:
    """The losses of four steps, and of two, a save, and two more in another engine."""
    whole = made(plan)
    expected = [whole.step(batch(step)) for step in range(4)]
    first = made(plan)
    losses = [first.step(batch(step)) for step in range(2)]
    first.save(folder)
    torch.manual_seed(99)  # another process has drawn other numbers
    rest = made(plan, seed=None)
    rest.load(folder)
    return expected, losses + [rest.step(batch(step)) for step in (2, 3)]


IN_SHORT = ("shard", "sequences on tp", "pp", "recomputed")


@pytest.mark.parametrize(
    "plan", [plan if plan in IN_SHORT else pytest.param(plan, marks=pytest.mark.matrix) for plan in PLANS]
)
def test_a_resume_drops_what_the_whole_run_does(world: World, plan: str, tmp_path: Path) -> None:
    for expected, losses in world.run(resumed, plan, tmp_path, num_ranks=PLANS[plan][0], backend="torsh", timeout_s=60):
        assert losses == expected
        assert len(set(losses)) == 4


class Skipping(Model):
    """Leaves out half of its blocks at random, as transformers' models with a layerdrop do."""

    def __init__(self) -> None:
        super().__init__()
        self.layerdrop = 0.5

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            if not self.training or torch.rand([]) > self.layerdrop:
                hidden = block(hidden)
        return self.head(hidden)


def skipped() -> list[float]:
    torch.manual_seed(0)
    model = Skipping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = parallelize(model, optimizer, Plan(mesh={"shard": 2}), loss_fn=loss_fn)
    return [engine.step(batch(step)) for step in range(6)]


def test_ranks_of_shards_leave_out_the_same_layers(world: World) -> None:
    first, second = world.run(skipped, num_ranks=2, backend="torsh", timeout_s=60)
    assert first == second
