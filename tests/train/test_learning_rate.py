"""Learning rates: scaled with the replicas, warmed up, scheduled, rescaled when the world changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler, ReduceLROnPlateau

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import TrainingConfig
from torsh_distributed.train.learning_rate import LearningRate, scale_learning_rate, warmup_factor


def two_groups() -> SGD:
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    return SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.01}])


def used_rates(rates: LearningRate, optimizer: SGD, num_steps: int, start: int = 0) -> list[float]:
    """What the second group is updated with."""
    used = []
    for step in range(start, start + num_steps):
        with rates.updating(step) as first:
            assert first == pytest.approx(optimizer.param_groups[0]["lr"])
            used.append(optimizer.param_groups[1]["lr"])
            optimizer.step()
        rates.advance()
    return used


@pytest.mark.parametrize(
    ("scaling", "expected"), [("none", 0.1), ("linear", 0.4), ("square_root", 0.2), ("adaptive", 0.3)]
)
def test_the_rate_grows_with_replicas_or_batch(scaling: str, expected: float) -> None:
    """Four replicas, 288 samples in a batch: sqrt(288 / 32) = 3."""
    found = scale_learning_rate(0.1, scaling, data_degree=4, batch_size=288)  # type: ignore[arg-type]
    assert found == pytest.approx(expected)


@given(st.integers(0, 300), st.integers(0, 100))
def test_warmup_rises_in_a_line_and_ends_at_one(step: int, warmup_steps: int) -> None:
    factor = warmup_factor(step, warmup_steps=warmup_steps)
    assert factor == (1.0 if step >= warmup_steps else (step + 1) / warmup_steps)


def test_warmup_is_over_every_group_and_leaves_the_rates_as_they_were() -> None:
    optimizer = two_groups()
    rates = LearningRate(optimizer, TrainingConfig(warmup_steps=4), data_degree=1)
    assert used_rates(rates, optimizer, 6) == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]


@pytest.mark.parametrize(
    "scheduler_fn", [lambda optimizer: ExponentialLR(optimizer, 0.5), lambda optimizer: CosineAnnealingLR(optimizer, 8)]
)
def test_a_scheduler_runs_on_scaled_rates_under_the_warmup(scheduler_fn: object) -> None:
    plain = two_groups()
    scheduler: LRScheduler = scheduler_fn(plain)  # type: ignore[operator]
    expected = []
    for step in range(6):
        expected.append(plain.param_groups[1]["lr"] * 2 * min(1, (step + 1) / 3))
        plain.step()
        scheduler.step()
    optimizer = two_groups()
    training = TrainingConfig(warmup_steps=3, lr_scaling="linear")
    rates = LearningRate(optimizer, training, data_degree=2, scheduler_fn=scheduler_fn)  # type: ignore[arg-type]
    assert used_rates(rates, optimizer, 6) == pytest.approx(expected)


def test_state_goes_on_and_fits_another_number_of_replicas() -> None:
    training = TrainingConfig(lr_scaling="linear")

    def halved(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return CosineAnnealingLR(optimizer, 10)

    whole = two_groups()
    expected = used_rates(LearningRate(whole, training, data_degree=1, scheduler_fn=halved), whole, 8)
    first = two_groups()
    rates = LearningRate(first, training, data_degree=2, scheduler_fn=halved)
    head = used_rates(rates, first, 5)
    second = two_groups()
    resumed = LearningRate(second, training, data_degree=4, scheduler_fn=halved)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(rates.state_dict(), data_degree=4)
    tail = used_rates(resumed, second, 3, start=5)
    assert [rate / 2 for rate in head] + [rate / 4 for rate in tail] == pytest.approx(expected)


def test_a_rate_held_in_a_tensor_is_changed_in_place() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate, foreach=False)
    rates = LearningRate(optimizer, TrainingConfig(warmup_steps=2, lr_scaling="linear"), data_degree=3)
    with rates.updating(0) as used:
        assert used == pytest.approx(0.15)
        assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("scheduler_fn", "message"),
    [
        (ReduceLROnPlateau, r"(?s)stepped with a number.*ReduceLROnPlateau\(engine"),
        (CosineAnnealingLR(two_groups(), T_max=3), "must be a function from the optimizer"),
        (lambda optimizer: None, "must return a scheduler"),
    ],
    ids=["plateau", "an object", "nothing"],
)
def test_a_scheduler_that_cannot_be_stepped_is_refused_before_the_first_update(scheduler_fn: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        LearningRate(two_groups(), TrainingConfig(), data_degree=1, scheduler_fn=scheduler_fn)
