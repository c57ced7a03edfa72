"""Codebooks: values fitted to the data, as good as the best, and a contraction."""

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
from torsh_distributed.compress.codecs.dense.bimodal import BimodalCodec, fit_codebook
from torsh_distributed.compress.kernels.torch_kernels import TorchKernels

entries = st.sampled_from([2, 3, 4, 16, 100, 256])


@given(gradients(), entries)
@examples
def test_the_payload_has_the_promised_size(x: Tensor, num_entries: int) -> None:
    assert_exact_size(BimodalCodec(num_entries), x)


def test_the_formula_for_its_size() -> None:
    assert BimodalCodec(2).payload_bytes(8000) == 2 * 4 + 1000
    assert BimodalCodec(16).payload_bytes(8000) == 16 * 4 + 4000
    assert BimodalCodec(100).payload_bytes(8000) == 100 * 4 + 7000
    assert BimodalCodec(16).payload_bytes(0) == 0


@given(gradients(PLAIN_KINDS), entries)
@examples
def test_it_contracts_as_stated(x: Tensor, num_entries: int) -> None:
    assert_contracts(BimodalCodec(num_entries), x, Key())


@given(gradients(PLAIN_KINDS).filter(lambda x: x.numel() > 0), entries)
@examples
def test_every_value_is_the_mean_of_the_elements_that_get_it(x: Tensor, num_entries: int) -> None:
    decoded = through(BimodalCodec(num_entries), x, Key())
    assert decoded.unique().numel() <= num_entries
    for value in decoded.unique():
        mean = x[decoded == value].double().mean()
        assert abs(float(mean - value)) <= 1e-6 * float(x.abs().max())


@pytest.mark.parametrize(("num_entries", "least_error"), [(2, 0.3634), (4, 0.1175), (8, 0.03454), (16, 0.009497)])
def test_a_normal_distribution_is_fitted_nearly_as_well_as_can_be(num_entries: int, least_error: float) -> None:
    """The least errors are those of Lloyd-Max quantisers for a normal distribution, as tabulated by Max (1960)."""
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    error = float((through(BimodalCodec(num_entries), x, Key()) - x).square().mean())
    assert least_error * 0.97 < error < least_error * 1.08


def test_two_modes_are_found_where_they_are() -> None:
    x = torch.cat([gradient(500, 1) * 0.01 - 1.0, gradient(100, 2) * 0.01 + 5.0])
    values = fit_codebook(TorchKernels().histogram(x), 2).values
    torch.testing.assert_close(values, torch.tensor([-1.0, 5.0]), rtol=0.01, atol=0)


@given(gradients(["zeros", "negative zeros", "subnormal"]))
@examples
def test_what_is_too_small_is_sent_as_zeros(x: Tensor) -> None:
    assert torch.equal(through(BimodalCodec(4), x, Key()), torch.zeros_like(x))


@given(gradients(["huge", "bits"]))
@examples
def test_huge_elements_stay_finite(x: Tensor) -> None:
    assert bool(through(BimodalCodec(16), x, Key()).isfinite().all())


def test_it_rounds_in_one_way_and_refuses_damage() -> None:
    assert_key_is_ignored(BimodalCodec(), gradient(1000, 2))
    assert_refuses_damage(BimodalCodec())
