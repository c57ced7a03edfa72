"""Powers of two: one of the two around an element, unbiased, a second moment of 9/8 at most."""

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
    draws,
)
from tests.compress.examples import examples
from tests.compress.gradients import PLAIN_KINDS, gradients
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.dense.rounding import NaturalCodec


@given(gradients())
@examples
def test_the_payload_has_the_promised_size(x: Tensor) -> None:
    assert_exact_size(NaturalCodec(), x)


def test_the_formula_for_its_size() -> None:
    assert NaturalCodec().payload_bytes(5000) == 5000 + 5
    assert NaturalCodec().payload_bytes(1025) == 1025 + 2


@given(gradients(PLAIN_KINDS), st.integers(0, 1000))
@examples
def test_an_element_becomes_a_power_of_two_next_to_it(x: Tensor, step: int) -> None:
    decoded = through(NaturalCodec(), x, Key(step=step))
    mantissa, _ = torch.frexp(decoded)
    assert bool(((mantissa.abs() == 0.5) | (x == 0)).all())
    assert torch.equal(decoded.sign(), x.sign())
    assert bool(((decoded.abs() > x.abs() / 2) | (x == 0)).all())
    assert bool(((decoded.abs() < x.abs() * 2) | (x == 0)).all())


@given(gradients())
@examples
def test_powers_of_two_are_exact_and_everything_stays_finite(x: Tensor) -> None:
    powers = through(NaturalCodec(), x, Key())
    assert bool(powers.isfinite().all())
    assert torch.equal(through(NaturalCodec(), powers, Key(step=1)), powers)


@pytest.mark.parametrize("by_key", [True, False])
def test_the_mean_of_many_draws_is_the_gradient(by_key: bool) -> None:
    x = gradient(1024, 3)
    assert_unbiased(NaturalCodec(), x, by_key=by_key, jump=x.abs())


def test_the_second_moment_grows_by_an_eighth_at_most() -> None:
    x = torch.linspace(1, 2, 1024)
    found = draws(NaturalCodec(), x, by_key=False).double().square()
    growth = found.mean(0) / x.square()
    tolerance = 6 * found.std(0) / x.square() / len(found) ** 0.5
    assert bool((growth <= 9 / 8 + tolerance).all())
    worst = growth[(x - 4 / 3).abs() < 0.01].mean()
    assert 1.11 < float(worst) < 1.14  # at 4/3 it is 9/8


def test_subnormal_elements_are_unbiased_too() -> None:
    x = torch.full((1024,), 2.0**-127)
    kept = through(NaturalCodec(), x.repeat(100), Key()).count_nonzero()
    assert 0.49 < float(kept) / 102_400 < 0.51


def test_keys_decide_and_damage_is_refused() -> None:
    assert_keys_decide(NaturalCodec(), gradient(1000, 2))
    assert_refuses_damage(NaturalCodec())
