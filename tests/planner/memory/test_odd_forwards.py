"""Forwards that are no plain chain of blocks: the estimate against the peak of a real training on one rank."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tests.bed.world import World
from tests.planner.live_memory import measured_peak
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.planner.machine.machine_profile import machine_named
from torsh_distributed.planner.memory.optimizer_profile import optimizer_named
from torsh_distributed.planner.memory.rank_memory import estimate_memory
from torsh_distributed.planner.model.model_profile import ModelProfile
from torsh_distributed.planner.model.profiling import profile_model
from torsh_distributed.planner.search.auto_plan import ranked_plans
from torsh_distributed.train.demos.gpt import CONTEXT

PLAN = Plan(dp=1, training={"batch_size": 16})


class Odd(nn.Module):
    """Feed-forward blocks over characters, called in one of several ways."""

    def __init__(self, way: str, width: int = 96) -> None:
        super().__init__()
        self.way = way
        self.token = nn.Embedding(96, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)
        )
        self.head = nn.Linear(width, 96)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.token(ids)
        if self.way == "without gradients first":
            with torch.no_grad():
                for block in self.blocks[:2]:
                    hidden = block(hidden)
        rounds = 4 if self.way == "in rounds" else 1
        left_out = {"left out": 2, "without gradients first": 2}.get(self.way, 0)
        for block in [*self.blocks[left_out:]] * rounds:
            run = block
            if self.way.startswith("recomputed"):
                run = partial(checkpoint, block, use_reentrant=self.way == "recomputed by a reentrant call")
            hidden = hidden + run(hidden)
        out: Tensor = self.head(hidden)
        return out


UNREACHED = ("left out", "without gradients first")
"""Parameters without a gradient get no state, which the estimate does not know."""
WAYS = ["in rounds", "left out", "without gradients first", "recomputed", "recomputed by a reentrant call"]


def profile_of(way: str) -> ModelProfile:
    return profile_model(Odd(way), PLAN, sequence=CONTEXT)


@pytest.mark.ranks
@pytest.mark.parametrize("way", WAYS)
def test_the_estimate_is_near_the_measured_peak(world: World, way: str) -> None:
    table = estimate_memory(profile_of(way), PLAN.resolve(1), optimizer_named("AdamW"), device_type="cpu")
    (measured,) = world.run(measured_peak, partial(Odd, way), PLAN, num_ranks=1)
    assert 0.94 < table.peak_bytes / measured < (1.2 if way in UNREACHED else 1.06), table.peak


@pytest.mark.parametrize("way", WAYS)
def test_every_parameter_counts_once_however_often_it_is_used(way: str) -> None:
    assert profile_of(way).all_params.numel() == sum(param.numel() for param in Odd(way).parameters())


def test_layers_that_are_not_called_are_named() -> None:
    (note,) = profile_of("left out").notes
    assert note.startswith("its forward does not call blocks.0, blocks.1: their parameters count")
    ranking = ranked_plans(Odd("left out"), world_size=1, machine=machine_named("h100"), sequence=CONTEXT)
    assert ranking.notes == (note,)


def test_layers_that_run_more_than_once_make_no_pipeline() -> None:
    with pytest.raises(ConfigurationError, match="calls the same layers more than once"):
        estimate_memory(profile_of("in rounds"), Plan(dp=1, pp=2).resolve(2), optimizer_named("AdamW"))
