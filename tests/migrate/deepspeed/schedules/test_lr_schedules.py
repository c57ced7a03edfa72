"""DeepSpeed's learning rates: the numbers of the real package, for every schedule and its odd corners."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch

from tests.bed.real_deepspeed import use_deepspeed
from tests.migrate.deepspeed.conftest import DeepSpeedWorld
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.migrate.deepspeed.schedules.lr_schedules import make_schedule

NUM_STEPS = 60
CASES: list[tuple[str, dict[str, Any]]] = [
    ("LRRangeTest", {}),
    ("LRRangeTest", {"lr_range_test_min_lr": [1e-4, 3e-4], "lr_range_test_step_size": 7}),
    ("LRRangeTest", {"lr_range_test_step_size": 7, "lr_range_test_step_rate": 2.5, "lr_range_test_staircase": True}),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}),
    ("OneCycle", {"cycle_min_lr": [1e-4, 2e-4], "cycle_max_lr": 1e-2, "cycle_first_step_size": 11}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 10,
            "cycle_second_step_size": 17,
            "cycle_first_stair_count": 5,
            "cycle_second_stair_count": 3,
            "decay_step_size": 4,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.01,
            "cycle_min_mom": 0.7,
        },
    ),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 9, "cycle_second_step_size": 0}),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 9, "cycle_momentum": False}),
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupLR", {"warmup_num_steps": 20, "warmup_type": "linear", "warmup_min_lr": 1e-5}),
    ("WarmupLR", {"warmup_num_steps": 20, "warmup_max_lr": [0.1, 0.2], "warmup_type": "exponential"}),
    ("WarmupDecayLR", {"total_num_steps": 50, "warmup_num_steps": 13}),
    ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 13, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 40, "warmup_num_steps": 4, "warmup_min_lr": 1e-4, "warmup_max_lr": 0.02}),
    ("WarmupCosineLR", {"total_num_steps": 50, "warmup_num_steps": 13}),
    ("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 13, "cos_min_ratio": 0.2}),
    (
        "WarmupCosineLR",
        {"total_num_steps": 45, "warmup_num_steps": 8, "warmup_min_ratio": 0.1, "warmup_type": "linear"},
    ),
]


def _optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.003, 0.03)]
    return torch.optim.AdamW(groups)


def _numbers(optimizer: torch.optim.Optimizer) -> list[float]:
    return [number for group in optimizer.param_groups for number in (group["lr"], *group["betas"])]


def _walked(schedule: Any, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """Rates and betas before the first step, after every step, and after a jump back."""
    seen = [_numbers(optimizer)]
    for _ in range(NUM_STEPS):
        schedule.step()
        seen.append(_numbers(optimizer))
    schedule.step(5)
    seen.append([*_numbers(optimizer), *schedule.get_last_lr(), schedule.state_dict()["last_batch_iteration"]])
    schedule.load_state_dict({"last_batch_iteration": 20})
    schedule.step()
    return [*seen, _numbers(optimizer)]


def _theirs() -> list[list[list[float]]]:
    use_deepspeed()
    schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
    walked = []
    for kind, params in CASES:
        optimizer = _optimizer()
        walked.append(_walked(getattr(schedules, kind)(optimizer, **params), optimizer))
    return walked


@pytest.mark.needs_deepspeed
def test_rates_and_momenta_are_those_of_deepspeed(deepspeed_world: DeepSpeedWorld) -> None:
    (theirs,) = deepspeed_world.run_theirs(_theirs, num_ranks=1)
    for (kind, params), expected in zip(CASES, theirs, strict=True):
        optimizer = _optimizer()
        ours = _walked(make_schedule(kind, params, optimizer), optimizer)
        for step, (mine, wanted) in enumerate(zip(ours, expected, strict=True)):
            assert mine == pytest.approx(wanted, rel=1e-12, abs=1e-15), f"{kind} {params} after {step} steps"


def test_the_default_warm_up_is_logarithmic() -> None:
    """The closed form: log(step + 1) / log(10), which torch's linear warm-up is not."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = make_schedule("WarmupLR", {"warmup_num_steps": 10}, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0
    rates = []
    for _ in range(12):
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == 0
    assert rates[3] == pytest.approx(0.5 * 0.6020599913, rel=1e-9)
    assert rates[9:] == [0.5, 0.5, 0.5]


def test_a_rate_that_is_a_tensor_is_filled_in_place() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = make_schedule("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, optimizer)
    for _ in range(2):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25
    schedule.step()
    assert float(rate) == 0.5


def test_an_object_that_holds_the_optimizer_is_accepted() -> None:
    class Wrapper:
        optimizer = _optimizer()

    assert make_schedule("WarmupLR", {}, Wrapper()).optimizer is Wrapper.optimizer
    with pytest.raises(InvalidArgument, match="needs a torch optimizer"):
        make_schedule("WarmupLR", {}, object())


def test_momentum_is_left_alone_where_there_are_no_betas(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    with caplog.at_level(logging.WARNING):
        make_schedule("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}, optimizer).step()
    assert "cycle_momentum has no effect: SGD has no betas" in caplog.text


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmupDecayLr", {}, "did you mean WarmupDecayLR"),
        ("WarmupLR", {"warmup_steps": 5}, "did you mean warmup_num_steps"),
        ("WarmupDecayLR", {}, "lacks total_num_steps"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps must be a positive integer"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps must be a positive integer"),
        ("WarmupLR", {"warmup_max_lr": [1.0]}, "has 1 values, but the optimizer has 2 groups"),
        ("LRRangeTest", {"lr_range_test_step_size": -1}, "lr_range_test_step_size must be a positive integer"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "must be positive"),
    ],
)
def test_a_wrong_schedule_is_refused_in_words(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigurationError, InvalidArgument), match=message):
        make_schedule(kind, params, _optimizer())
