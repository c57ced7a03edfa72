"""The rules of the loss scale; with DeepSpeed itself they are compared in test_deepspeed_engine."""

from __future__ import annotations

import pytest

from torsh_distributed.errors import NonFiniteLoss
from torsh_distributed.migrate.deepspeed.training.loss_scales import DynamicLossScaler, PlainDynamicScaler, make_scaler


def test_hysteresis_delays_the_first_halving_and_growth_refills_it() -> None:
    scaler = DynamicLossScaler(2.0**8, scale_window=2, min_scale=1, delayed_shift=2)
    seen = []
    for overflow in (True, True, False, False, False, True, True):
        scaler.update_scale(overflow)
        seen.append((scaler.loss_scale, scaler.cur_hysteresis))
    assert seen == [(256, 1), (128, 1), (128, 1), (128, 1), (256, 2), (256, 1), (128, 1)]


def test_an_overflow_at_the_minimum_ends_a_run_with_zero_only() -> None:
    with_zero = DynamicLossScaler(2.0, scale_window=10, min_scale=1, delayed_shift=1)
    with_zero.update_scale(True)
    with pytest.raises(NonFiniteLoss, match="Current loss scale already at minimum"):
        with_zero.update_scale(True)
    without = PlainDynamicScaler(2.0, scale_window=10, min_scale=1)
    for _ in range(3):
        without.update_scale(True)
    assert without.loss_scale == 1


def test_the_section_chooses_the_rule_and_its_state_resumes() -> None:
    assert make_scaler({}, is_zero=True).loss_scale == 1
    assert make_scaler({"enabled": True, "loss_scale": 7}, is_zero=True).loss_scale == 7
    assert type(make_scaler({"enabled": True}, is_zero=False)) is PlainDynamicScaler
    first = make_scaler({"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}, is_zero=True)
    for overflow in (True, True, False):
        first.update_scale(overflow)
    second = make_scaler({"enabled": True, "initial_scale_power": 9, "loss_scale_window": 2}, is_zero=True)
    second.load_state_dict(first.state_dict())
    for overflow in (False, False, False):
        first.update_scale(overflow)
        second.update_scale(overflow)
        assert second.loss_scale == first.loss_scale
