"""Block int8: an error of half a level, blocks that do not disturb each other, no division by zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.compress.codecs.checks import assert_contracts, gradient, through
from tests.compress.codecs.quantisers import assert_exact_size, assert_key_is_ignored, assert_refuses_damage
from tests.compress.examples import examples
from tests.compress.gradients import PLAIN_KINDS, gradients
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.dense.quantiser import ROUNDING
from torsh_distributed.compress.codecs.dense.rounding import Int8Codec

blocks = st.sampled_from([8, 100, 256, 4096])


@given(gradients(), blocks)
@examples
def test_the_payload_has_the_promised_size(x: Tensor, block: int) -> None:
    assert_exact_size(Int8Codec(block), x)


@given(gradients(), blocks)
@examples
def test_an_element_is_off_by_half_a_level_of_its_block(x: Tensor, block: int) -> None:
    decoded = through(Int8Codec(block), x, Key())
    for start in range(0, x.numel(), block):
        part, got = x[start : start + block].double(), decoded[start : start + block].double()
        largest = float(part.abs().max())
        assert bool(((part - got).abs() <= largest / 254 * (1 + 1e-5) + 2.0**-120).all())


@given(gradients(PLAIN_KINDS), blocks)
@examples
def test_it_contracts_as_stated(x: Tensor, block: int) -> None:
    assert_contracts(Int8Codec(block), x, Key())


def test_the_formula_for_its_size() -> None:
    assert Int8Codec(256).payload_bytes(10_000) == 4 * 40 + 10_000
    assert Int8Codec().payload_bytes(257) == 4 * 2 + 257
    assert Int8Codec().contraction(0) == Int8Codec().contraction(1) == 1 - ROUNDING


def test_an_outlier_costs_precision_to_its_block_only() -> None:
    x = gradient(1024, 1)
    x[0] = 1e6
    decoded = through(Int8Codec(256), x, Key())
    assert float((decoded - x)[256:].abs().max()) < 0.02
    assert float((decoded - x)[:256].abs().max()) > 0.02


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-42, -1e-38, 7.5e-37])
def test_blocks_too_small_for_a_scale_are_sent_as_zeros(value: float) -> None:
    assert torch.equal(through(Int8Codec(), torch.full((300,), value), Key()), torch.zeros(300))


def test_it_rounds_in_one_way_and_refuses_damage() -> None:
    assert_key_is_ignored(Int8Codec(), gradient(1000, 2))
    assert_refuses_damage(Int8Codec())
