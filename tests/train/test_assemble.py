"""Ranks agree on what they were started with before the first step, or all say which of them differs in what."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize


def message(odd: int, case: str) -> str:
    """What this rank is told when rank `odd` alone differs."""
    is_odd = torch.distributed.get_rank() == odd
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    plan: dict[str, Any] = {"training": {"steps": 3, "seed": 8 if is_odd and case == "seed" else 7}}
    if case == "mesh":
        plan["mesh"] = {"dp": 1, "shard": 2} if is_odd else {"dp": 2}
    rate = 0.2 if is_odd else 0.1
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=rate if case == "learning rate" else 0.1)
    if case == "optimizer":
        optimizer = (torch.optim.Adam if is_odd else torch.optim.AdamW)(model.parameters())
    elif case == "groups":
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": rate}]
        optimizer = torch.optim.AdamW(groups)
    elif case == "partial":
        optimizer = functools.partial(torch.optim.SGD, lr=rate)
    elif case == "function":
        optimizer = lambda params: torch.optim.SGD(params, lr=rate)  # noqa: E731
    elif case == "stages":
        plan |= {"mesh": {"dp": 1, "pp": 2}, "pipeline": {"num_microbatches": 2}}
        optimizer = functools.partial(torch.optim.SGD, lr=rate)
    size = 2 if is_odd and case == "schedule" else 1
    inputs = torch.zeros(9 if is_odd and case == "length" else 8, 6)
    data = TensorDataset(inputs, torch.zeros(len(inputs), dtype=torch.long))
    loader = DataLoader(data, batch_size=2 if is_odd and case == "batch size" else 4)
    try:
        engine = parallelize(
            model,
            optimizer,
            Plan.from_dict(plan),
            loss_fn=functional.cross_entropy,
            scheduler_fn=lambda made: torch.optim.lr_scheduler.StepLR(made, step_size=size),
        )
        if case == "evaluation":
            engine.evaluate([(inputs, data.tensors[1])] * (3 if is_odd else 2))
        next(engine.batches(loader))
    except ConfigurationError as error:
        return error.message
    return "accepted"


@pytest.mark.parametrize(
    ("case", "difference"),
    [
        ("seed", "has plan {'training.seed': 7}, rank 1 has {'training.seed': 8}"),
        ("mesh", "has plan {'mesh.dp': 2, 'mesh.shard': 1}, rank 1 has {'mesh.dp': 1, 'mesh.shard': 2}"),
        ("learning rate", "has optimizer {'lr': 0.1}, rank 1 has {'lr': 0.2}"),
        ("optimizer", "has optimizer {'class': 'AdamW'"),
        ("groups", "has optimizer {'groups[1].weight_decay': 0.1}, rank 1 has {'groups[1].weight_decay': 0.2}"),
        ("partial", "has optimizer {'lr': 0.1}, rank 1 has {'lr': 0.2}"),
        ("function", "has optimizer {'lr': 0.1, 'initial_lr': 0.1}, rank 1 has {'lr': 0.2, 'initial_lr': 0.2}"),
        ("stages", "has optimizer {'lr': 0.1}, rank 1 has {'lr': 0.2}"),
        ("schedule", "has scheduler {'step_size': 1}, rank 1 has {'step_size': 2}"),
        ("length", "has data {'samples': 8}, rank 1 has {'samples': 9}"),
        ("batch size", "has data {'batch size': 4}, rank 1 has {'batch size': 2}"),
        ("evaluation", "has data {'batches': 2}, rank 1 has {'batches': 3}"),
    ],
)
def test_a_rank_that_differs_is_named_with_its_value_before_the_first_step(
    world: World, case: str, difference: str
) -> None:
    for text in world.run(message, 1, case):
        assert text.startswith("the ranks' settings differ: rank 0 ")
        assert difference in text


def test_ranks_that_agree_begin(world: World) -> None:
    assert world.run(message, 9, "groups") == ["accepted", "accepted"]


def by_stage() -> str:
    """A function that makes a group for each layer of its own stage."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    plan = Plan.from_dict({"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 2}})
    rank = torch.distributed.get_rank()

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": [one], "lr": 0.1 / (number + 1 + rank)} for number, one in enumerate(params)]
        )

    try:
        parallelize(model, optimizer, plan, loss_fn=functional.cross_entropy)
    except ConfigurationError as error:
        return error.message
    return "accepted"


def test_stages_may_have_groups_of_their_own(world: World) -> None:
    assert world.run(by_stage) == ["accepted", "accepted"]
