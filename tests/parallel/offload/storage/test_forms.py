"""Forms: exact sizes, errors within bounds, and rounding without drift."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torsh_distributed.parallel.offload.storage.forms import BF16, FORMS, FP16, INT8, LOSSLESS, Form


def values_of(seed: int, numel: int, scale: float) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 700), st.sampled_from([1e-3, 1.0, 50.0]), st.sampled_from(sorted(FORMS)))
def test_what_comes_back_is_within_the_bound_of_the_form(seed: int, numel: int, scale: float, name: str) -> None:
    form, generator = FORMS[name], torch.Generator().manual_seed(seed)
    values = values_of(seed, numel, scale)
    payload = form.encode(values, role="param", generator=generator)
    assert payload.dtype == torch.uint8
    assert form.num_bytes(numel) in (None, payload.numel())
    error = (form.decode(payload, numel, role="param") - values).abs()
    if form.is_exact:
        assert error.max() == 0
    elif name == "int8":
        blocks = torch.nn.functional.pad(values, (0, -numel % 256)).view(-1, 256)
        step = (blocks.abs().amax(dim=1) / 127).repeat_interleave(256)[:numel]
        assert (error <= step * 1.001).all()
    else:
        mantissa_bits = 7 if name == "bf16" else 10
        floor = 0.0 if name == "bf16" else 2.0**-24  # fp16 has subnormal numbers
        assert (error <= values.abs() * 2.0**-mantissa_bits + floor).all()


@pytest.mark.parametrize("form", [BF16, FP16, INT8], ids=lambda form: form.name)
def test_parameters_are_rounded_without_drift(form: Form) -> None:
    """A tiny update is lost by nearest rounding every time; on average over roundings it must survive."""
    values = torch.linspace(0.5, 1.0, 256)
    draws, many = 4000, values.repeat(4000)
    payload = form.encode(many, role="param", generator=torch.Generator().manual_seed(0))
    mean = form.decode(payload, many.numel(), role="param").view(draws, 256).double().mean(dim=0)
    spacing = {"bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 127}[form.name]
    # Five standard deviations of the mean of draws that differ by one spacing.
    assert (mean - values).abs().max() < 5 * spacing / 2 / draws**0.5


@pytest.mark.parametrize("form", [BF16, FP16, INT8], ids=lambda form: form.name)
def test_second_moments_never_vanish_beside_large_ones(form: Form) -> None:
    variance = torch.tensor([1e-9, 1e-8, 1e-6, 1e-4])
    payload = form.encode(variance, role="variance", generator=torch.Generator())
    back = form.decode(payload, 4, role="variance")
    assert (back > 0).all()
    if form is INT8:
        assert (back >= variance * 0.999).all(), "rounded up: an update may be damped, never blown up"


def test_lossless_is_smaller_on_weights_and_exact_to_the_bit() -> None:
    weights = values_of(1, 20_000, 0.02)
    payload = LOSSLESS.encode(weights, role="param", generator=torch.Generator())
    assert payload.numel() < 0.92 * 4 * weights.numel()
    assert torch.equal(LOSSLESS.decode(payload, weights.numel(), role="param"), weights)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_nan_stays_nan(name: str) -> None:
    broken = torch.tensor([float("nan"), 1.0])
    payload = FORMS[name].encode(broken, role="param", generator=torch.Generator())
    assert FORMS[name].decode(payload, 2, role="param")[0].isnan()
