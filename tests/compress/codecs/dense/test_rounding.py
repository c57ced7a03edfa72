"""N bits: really packed, within a level, unbiased."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.compress.codecs.checks import gradient, through
from tests.compress.codecs.quantisers import (
    assert_exact_size,
    assert_keys_decide,
    assert_refuses_damage,
    assert_unbiased,
)
from tests.compress.examples import examples
from tests.compress.gradients import gradients
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.dense.rounding import NbitCodec


@given(gradients(), st.integers(1, 8))
@examples
def test_the_payload_has_the_promised_size(x: Tensor, bits: int) -> None:
    assert_exact_size(NbitCodec(bits), x)


def test_the_formula_for_its_size() -> None:
    for bits in range(1, 9):
        assert NbitCodec(bits).payload_bytes(512 * 100) == 100 * 8 + 512 * 100 * bits // 8


@given(gradients(), st.integers(1, 8), st.integers(0, 1000))
@examples
def test_an_element_moves_by_less_than_a_level(x: Tensor, bits: int, step: int) -> None:
    decoded = through(NbitCodec(bits), x, Key(step=step))
    assert bool(decoded.isfinite().all())
    for start in range(0, x.numel(), 512):
        part, got = x[start : start + 512].double(), decoded[start : start + 512].double()
        level = float(part.max() - part.min()) / (2**bits - 1)
        rounding = 1e-6 * float(part.abs().max())
        assert bool(((part - got).abs() <= level + rounding + 2.0**-118).all())


@pytest.mark.parametrize("bits", [1, 2, 4, 7])
@pytest.mark.parametrize("by_key", [True, False])
def test_the_mean_of_many_draws_is_the_gradient(bits: int, by_key: bool) -> None:
    x = gradient(512, bits)
    assert_unbiased(NbitCodec(bits), x, by_key=by_key, jump=(x.max() - x.min()) / (2**bits - 1))


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(1, 700), st.integers(1, 8))
@examples
def test_a_constant_is_exact(value: float, numel: int, bits: int) -> None:
    x = torch.full((numel,), value)
    if abs(value) >= 1e-36:
        assert torch.equal(through(NbitCodec(bits), x, Key()), x)


def test_keys_decide_and_damage_is_refused() -> None:
    assert_keys_decide(NbitCodec(4), gradient(1000, 2))
    assert_refuses_damage(NbitCodec(4))
