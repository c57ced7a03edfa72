"""Changes that a running job tries by itself: on all ranks alike, kept or taken back, with losses as they were."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import torsh_distributed as td
from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.plan.running_change import RunningChange
from torsh_distributed.train.engine import Engine
from torsh_distributed.train.job_changes.auto_optimization import SUBJECT, AutoOptimizationEngine, LiveAdvice
from torsh_distributed.train.job_changes.running_changes import change_plan

WINDOW = 5
TINY = {"max_bucket_size_mb": 0.005, "min_bucket_size_mb": 0.005}


def layers(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(dropout)) for _ in range(12)]
    return nn.Sequential(*parts, nn.Linear(32, 1))


def engine_of(sections: dict[str, Any], how: str = "exact", dropout: float = 0.0) -> Engine:
    training = {"batch_size": 16, "auto_optimize": how, "auto_optimize_window": WINDOW}
    plan = Plan(**{**sections, "training": {**training, **sections.get("training", {})}})
    sgd = partial(torch.optim.SGD, lr=0.05)
    return td.parallelize(layers(dropout), sgd, plan, loss_fn=nn.functional.mse_loss)


def step(engine: Engine, number: int) -> float:
    source = torch.Generator().manual_seed(number)
    rows = torch.randn(16, 32, generator=source)[8 * td.rank() : 8 * td.rank() + 8]
    return engine.step((rows, rows[:, :1]))


def advised(engine: Engine, *changes: dict[str, Any]) -> AutoOptimizationEngine:
    """What rank 0 would have told all: these changes, to be tried from the next update on."""
    auto = engine.auto_optimization
    assert auto is not None
    auto._waiting = [LiveAdvice(str(one), "a test", RunningChange.from_dict({"set": one})) for one in changes]
    return auto


def trained(sections: dict[str, Any], how: str, changes: list[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    engine = engine_of(sections, how)
    told: list[Any] = []
    auto = advised(engine, *changes) if how != "off" else None
    forget = events.subscribe(told.append, events.DecisionEvent)
    losses = [step(engine, number) for number in range(num_steps)]
    forget()
    if auto is None:
        return {"losses": losses}
    auto.close()
    return {
        "losses": losses,
        "attempts": [vars(one) for one in auto.attempts],
        "advice": auto.advice_only,
        "plan": engine.plan.to_dict(),
        "told": [one.choice for one in told if one.subject == SUBJECT],
    }


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sections", "change"),
    [
        ({"dp": 2, "ddp": TINY}, {"ddp": {"max_bucket_size_mb": 50.0, "min_bucket_size_mb": 25.0}}),
        pytest.param({"dp": 1, "shard": 2}, {"fsdp": {"forward_prefetch": True}}, marks=pytest.mark.matrix),
        pytest.param(
            {"dp": 2, "training": {"gradient_accumulation": 4}},
            {"training": {"gradient_accumulation": 2}},
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["buckets", "prefetch", "passes"],
)
def test_a_change_is_tried_in_turns_and_kept_or_taken_back_on_all_ranks(
    world: World, sections: dict[str, Any], change: dict[str, Any]
) -> None:
    num_steps = 7 * (WINDOW + 3) + 6
    one, other = world.run(trained, sections, "exact", [change], num_steps)
    assert one["attempts"] == other["attempts"]
    assert one["plan"] == other["plan"]
    (attempt,) = one["attempts"]
    kept_s = attempt["before_s"] - attempt["after_s"]
    assert attempt["is_kept"] == (attempt["low_s"] > 0 and kept_s >= 0.01 * attempt["before_s"])
    ((section, keys),) = change.items()
    for key, value in keys.items():
        before = Plan(**sections).to_dict()[section][key]
        assert one["plan"][section][key] == (value if attempt["is_kept"] else before)
    assert one["told"][0] == (f"{'kept' if attempt['is_kept'] else 'taken back'}: {attempt['change']}")
    assert other["told"] == []
    plain = world.run(trained, sections, "off", [], num_steps)[0]
    exact = "gradient_accumulation" not in keys  # other passes add in another order
    assert one["losses"] == (plain["losses"] if exact else pytest.approx(plain["losses"], rel=1e-5))


@pytest.mark.ranks
def test_what_the_job_refuses_is_advice_only_and_the_next_one_is_tried(world: World) -> None:
    changes = [{"ddp": {"max_bucket_size_mb": 50.0}}, {"fsdp": {"forward_prefetch": True}}]
    for one in world.run(begun, {"dp": 1, "shard": 2}, changes):
        (refusal,) = one["advice"].values()
        assert "sends no buckets" in refusal
        assert one["trial"] == "fsdp.forward_prefetch = true"


def begun(sections: dict[str, Any], changes: list[dict[str, Any]]) -> dict[str, Any]:
    engine = engine_of(sections)
    auto = advised(engine, *changes)
    for number in range(2 * (WINDOW + 3) + 4):
        step(engine, number)
    return {"advice": auto.advice_only, "trial": str(auto._trial.change if auto._trial else None)}


def looked(sections: dict[str, Any]) -> dict[str, Any]:
    """A job that looks by itself."""
    engine = engine_of(sections)
    auto = engine.auto_optimization
    assert auto is not None
    for number in range(3 * (WINDOW + 3)):
        step(engine, number)
    waiting = [str(one.change) for one in auto._waiting]
    waiting += [] if auto._trial is None else [str(auto._trial.change)]
    auto.close()
    return {"advice": auto.advice_only, "waiting": waiting}


@pytest.mark.ranks
def test_all_ranks_hear_the_same_advice(world: World) -> None:
    one, other = world.run(looked, {"dp": 2, "ddp": TINY})
    assert one == other


def judged(dropout: float, how: str) -> list[tuple[str, str]]:
    engine = engine_of({"training": {"gradient_accumulation": 4}}, how, dropout)
    auto = engine.auto_optimization
    assert auto is not None
    texts = (
        "[training]\ngradient_accumulation = 2",
        '[compress]\nmethod = "int8"',
        "[training]\nbatch_size = 64",
        "",
    )
    found = [auto._judged(engine, "advice", "told", text, 1e15) for text in texts]
    return [(str(one.change), one.refusal) for one in found]


@pytest.mark.ranks
def test_what_would_change_losses_is_advice_only(world: World) -> None:
    (exact,) = world.run(judged, 0.0, "exact", num_ranks=1)
    assert exact[0] == ("training.gradient_accumulation = 2", "")
    assert "changes gradients" in exact[1][1]
    assert "training.batch_size cannot change while a job runs" in exact[2][1]
    assert "no setting that changes" in exact[3][1]
    (lossy,) = world.run(judged, 0.3, "lossy", num_ranks=1)
    assert "dropout draws its numbers pass by pass" in lossy[0][1]
    assert lossy[1][0].startswith("compress.method")


def rebuilt_buckets() -> tuple[int, int]:
    engine = engine_of({"dp": 2, "ddp": TINY}, "off")
    for number in range(3):
        step(engine, number)
    before = len(engine.strategy.model.bucket_info())  # type: ignore[operator]  # a wrapper with buckets
    change_plan(engine, RunningChange.from_dict({"set": {"ddp": {"max_bucket_size_mb": 50.0}}}))
    for number in range(3):
        step(engine, number)
    return before, len(engine.strategy.model.bucket_info())  # type: ignore[operator]  # as above


@pytest.mark.ranks
def test_buckets_are_built_again(world: World) -> None:
    for before, after in world.run(rebuilt_buckets):
        assert before > 2
        assert after <= 2


def test_ranks_that_come_and_go_do_not_change_together() -> None:
    plan = Plan(training={"auto_optimize": "exact"}, elastic={"enabled": True})
    with pytest.raises(ConfigurationError, match=r"training\.auto_optimize"):
        plan.validate(2)
