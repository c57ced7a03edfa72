"""One line says what a run on a GPU does without, and events say it to `torsh why`."""

from __future__ import annotations

import logging
import tomllib
from typing import Any

import pytest
import torch
from torch import nn

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.speed.suggestions import (
    bf16_suggestion,
    missing_speedups,
    plan_suggestions,
    suggestion_line,
)

SUGGESTED = [
    events.SuggestionEvent(title="compile", plan_change="[compile]\nenabled = true", gain=0.25, evidence="seen"),
    events.SuggestionEvent(title="AdamW(…, fused=True)", gain_s=0.002, evidence="seen"),
]


def test_all_of_them_are_one_line() -> None:
    line = suggestion_line(SUGGESTED)
    assert "[compile] enabled = true (25% less time, measured on an H200); AdamW(…, fused=True) (2.0 ms less" in line
    assert "\n" not in line


def test_on_the_cpu_nothing_is_suggested() -> None:
    model = nn.Linear(2, 2)
    assert list(missing_speedups(Plan(), model, torch.optim.AdamW(model.parameters()))) == []


@pytest.mark.parametrize(
    ("batch_size", "change"),
    [
        (16, "[pipeline]\nnum_microbatches = 8"),
        (4, '[pipeline]\nschedule = "interleaved_one_f_one_b"\nstages_per_rank = 2'),
    ],
)
def test_a_pipeline_is_told_how_its_bubble_halves(batch_size: int, change: str) -> None:
    plan = Plan.from_dict({"mesh": {"pp": 2, "dp": 1}, "training": {"batch_size": batch_size}})
    (found,) = plan_suggestions(plan)
    assert (found.part, found.gain, found.plan_change) == ("bubble", 0.5, change)
    assert Plan.from_dict({**tomllib.loads(change), "mesh": {"pp": 2, "dp": 1}})


def test_a_plan_that_recomputes_is_told_what_it_repeats() -> None:
    (found,) = plan_suggestions(Plan.from_dict({"activation": {"strategy": "uniform"}}))
    assert (found.part, found.gain, found.takes_memory) == ("forward", 1.0, True)
    assert list(plan_suggestions(Plan())) == []


@pytest.mark.needs_cuda
def test_bf16_is_measured_on_this_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found = bf16_suggestion(Plan(), device)
    assert found is not None
    assert found.gain is not None
    assert 0.3 < found.gain < 1
    assert bf16_suggestion(Plan.from_dict({"precision": {"dtype": "bf16"}}), device) is None


def suggested(plan: dict[str, Any], is_fused: bool) -> tuple[list[str], list[str]]:
    """What the events of an engine suggest, and the lines of its log."""
    seen: list[Any] = []
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torsh_distributed.train.assemble")
    logger.addHandler(handler)
    unsubscribe = events.subscribe(seen.append, events.SuggestionEvent)
    model = nn.Linear(4, 4).cuda()
    parallelize(model, torch.optim.AdamW(model.parameters(), fused=is_fused), Plan.from_dict(plan))
    unsubscribe()
    logger.removeHandler(handler)
    return [one.title for one in seen], [line for line in lines if "could be faster" in line]


def suggested_by_plan() -> list[tuple[list[str], list[str]]]:
    fast = {"compile": {"enabled": True}}
    return [suggested({}, False), suggested(fast, False), suggested(fast, True), suggested({"mesh": {"cp": 1}}, True)]


@pytest.mark.ranks
@pytest.mark.needs_cuda
def test_what_a_plan_has_is_not_suggested(world: World) -> None:
    [found] = world.run(suggested_by_plan, num_ranks=1, backend="nccl")
    fused = "build the optimizer fused: AdamW(…, fused=True)"
    told = [[title for title in titles if title != "compute in bf16"] for titles, _ in found]
    assert told == [["compile the layers", fused], [fused], [], ["compile the layers"]]
    assert [len(lines) for _, lines in found] == [1, 1, 0, 1]
