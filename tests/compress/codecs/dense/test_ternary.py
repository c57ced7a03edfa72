"""Trits: five to a byte, by threshold or drawn without bias."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.compress.codecs.checks import assert_contracts, gradient, through
from tests.compress.codecs.quantisers import (
    assert_exact_size,
    assert_key_is_ignored,
    assert_keys_decide,
    assert_refuses_damage,
    assert_unbiased,
)
from tests.compress.examples import examples
from tests.compress.gradients import PLAIN_KINDS, gradients
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.dense.sign import RandomTernaryCodec, TernaryCodec, make_ternary

thresholds = st.sampled_from([0.01, 0.3, 0.5, 1.0])


@given(gradients(), thresholds)
@examples
def test_the_payload_has_the_promised_size(x: Tensor, threshold: float) -> None:
    assert_exact_size(TernaryCodec(threshold), x)
    assert_exact_size(RandomTernaryCodec(), x)


def test_the_formula_for_its_size() -> None:
    assert TernaryCodec().payload_bytes(1280 * 7 + 11) == 4 * 8 + 256 * 7 + 3


@given(gradients(PLAIN_KINDS), thresholds)
@examples
def test_it_keeps_what_reaches_the_threshold_at_its_mean_magnitude(x: Tensor, threshold: float) -> None:
    decoded = through(TernaryCodec(threshold), x, Key())
    for start in range(0, x.numel(), 1280):
        part, got = x[start : start + 1280], decoded[start : start + 1280]
        is_kept = (part.abs() >= part.abs().max() * threshold) & (part != 0)
        assert torch.equal(got != 0, is_kept)
        if bool(is_kept.any()):
            mean = part[is_kept].double().abs().mean().float()
            torch.testing.assert_close(got[is_kept], part[is_kept].sign() * mean, rtol=1e-6, atol=0)


@given(gradients(PLAIN_KINDS), thresholds)
@examples
def test_it_contracts_as_stated(x: Tensor, threshold: float) -> None:
    assert_contracts(TernaryCodec(threshold), x, Key())


@pytest.mark.parametrize("by_key", [True, False])
def test_the_mean_of_many_draws_is_the_gradient(by_key: bool) -> None:
    x = gradient(1280, 3)
    assert_unbiased(RandomTernaryCodec(), x, by_key=by_key, jump=x.abs().max())


def test_a_threshold_of_zero_draws() -> None:
    assert type(make_ternary(0.0)) is RandomTernaryCodec
    assert type(make_ternary(0.1)) is TernaryCodec


def test_keys_and_damage() -> None:
    assert_key_is_ignored(TernaryCodec(), gradient(1000, 2))
    assert_keys_decide(RandomTernaryCodec(), gradient(1000, 2))
    assert_refuses_damage(TernaryCodec())
    assert_refuses_damage(RandomTernaryCodec())
