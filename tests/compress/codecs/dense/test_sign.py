"""Signs: one bit an element, a contraction with the mean magnitude, and why error feedback is not optional."""

from __future__ import annotations

import torch
from hypothesis import given
from torch import Tensor

from tests.compress.codecs.checks import assert_contracts, gradient, through
from tests.compress.codecs.quantisers import assert_exact_size, assert_key_is_ignored, assert_refuses_damage
from tests.compress.examples import examples
from tests.compress.gradients import PLAIN_KINDS, gradients
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.dense.sign import SignCodec


@given(gradients())
@examples
def test_the_payload_has_the_promised_size(x: Tensor) -> None:
    assert_exact_size(SignCodec(), x)


def test_the_formula_for_its_size() -> None:
    assert SignCodec().payload_bytes(1024 * 50) == 50 * 4 + 1024 * 50 // 8


@given(gradients(PLAIN_KINDS))
@examples
def test_it_says_the_signs_and_the_mean_magnitude_of_a_block(x: Tensor) -> None:
    decoded = through(SignCodec(), x, Key())
    for start in range(0, x.numel(), 1024):
        part, got = x[start : start + 1024], decoded[start : start + 1024]
        expected = torch.where(part.signbit(), -1.0, 1.0) * part.double().abs().mean().float()
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@given(gradients(PLAIN_KINDS))
@examples
def test_it_contracts_as_stated(x: Tensor) -> None:
    assert_contracts(SignCodec(), x, Key())


def test_the_largest_floats_do_not_overflow() -> None:
    x = torch.full((2000,), 3.4e38) * torch.tensor([1.0, -1.0]).repeat(1000)
    torch.testing.assert_close(through(SignCodec(), x, Key()), x, rtol=1e-6, atol=0)


def descend(*, error_feedback: bool) -> float:
    """Subgradient steps on |a - b| + |a + b| / 2 from (1.31, 0.69). Signs alone move along (1, -1): a + b stays 2."""
    codec, at, residual = SignCodec(), torch.tensor([1.31, 0.69]), torch.zeros(2)
    for step in range(500):
        along = torch.where(at[0] >= at[1], 1.0, -1.0)
        across = torch.where(at[0] + at[1] >= 0, 0.5, -0.5)
        slope = torch.stack([across + along, across - along])
        wanted = slope * 0.05 / (1 + step) ** 0.5 + residual
        sent = through(codec, wanted, Key(step=step))
        if error_feedback:
            residual = wanted - sent
        at = at - sent
    return float((at[0] - at[1]).abs() + (at[0] + at[1]).abs() / 2)


def test_without_error_feedback_it_fails_the_known_counter_example() -> None:
    assert descend(error_feedback=False) >= 0.99
    assert descend(error_feedback=True) < 0.1


def test_it_rounds_in_one_way_and_refuses_damage() -> None:
    assert_key_is_ignored(SignCodec(), gradient(1000, 2))
    assert_refuses_damage(SignCodec())
