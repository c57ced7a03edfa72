"""The compiled kernels and torch's operators write the same bytes and read the same numbers, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.compress.examples import examples
from tests.compress.gradients import gradients
from torsh_distributed.compress.kernels.base import NUM_BINS, Kernels
from torsh_distributed.compress.kernels.bits import blocks_packed_bytes, trit_bytes
from torsh_distributed.compress.kernels.kernel_choice import compiled_kernels
from torsh_distributed.compress.kernels.torch_kernels import TorchKernels

Encode = Callable[[Kernels, Tensor], None]
Decode = Callable[[Kernels, Tensor, Tensor, float, bool], bool]
KEY, OFFSET = 4_000_000_007, 123_456_789_012


@pytest.fixture(scope="module")
def compiled() -> Kernels:
    kernels = compiled_kernels()
    if kernels is None:
        pytest.skip("the kernels were not built: no C compiler at install, or sources changed since")
    return kernels


def assert_twins(compiled: Kernels, numel: int, num_bytes: int, encode: Encode, decode: Decode) -> None:
    """Both encode to the same bytes, and decode them to the same bits, whether they write or add."""
    payloads = []
    for kernels in (compiled, TorchKernels()):
        payload = torch.full((num_bytes,), 255, dtype=torch.uint8)
        encode(kernels, payload)
        payloads.append(payload)
    assert torch.equal(*payloads)
    assert compiled.checksum(payloads[0]) == TorchKernels().checksum(payloads[0])
    for weight, adds in ((1.0, False), (1 / 3, True)):
        outs = []
        for kernels in (compiled, TorchKernels()):
            out = torch.full((numel,), 0.5)
            assert decode(kernels, payloads[0], out, weight, adds)
            outs.append(out.view(torch.int32))
        assert torch.equal(*outs)


def heads(x: Tensor, block: int) -> int:
    return -(-x.numel() // block)


@given(gradients(), st.sampled_from([8, 100, 256, 4096]))
@examples
def test_int8_is_the_same_in_both(compiled: Kernels, x: Tensor, block: int) -> None:
    assert_twins(
        compiled,
        x.numel(),
        4 * heads(x, block) + x.numel(),
        lambda kernels, out: kernels.int8_encode(x, block, out),
        lambda kernels, payload, out, weight, adds: kernels.int8_decode(payload, block, out, weight, adds),
    )


@given(gradients(), st.integers(1, 8))
@examples
def test_bits_are_the_same_in_both(compiled: Kernels, x: Tensor, bits: int) -> None:
    assert_twins(
        compiled,
        x.numel(),
        8 * heads(x, 512) + blocks_packed_bytes(x.numel(), 512, bits),
        lambda kernels, out: kernels.nbit_encode(x, 512, bits, KEY, OFFSET, out),
        lambda kernels, payload, out, weight, adds: kernels.nbit_decode(payload, 512, bits, out, weight, adds),
    )


@given(gradients())
@examples
def test_signs_are_the_same_in_both(compiled: Kernels, x: Tensor) -> None:
    assert_twins(
        compiled,
        x.numel(),
        4 * heads(x, 1024) + blocks_packed_bytes(x.numel(), 1024, 1),
        lambda kernels, out: kernels.sign_encode(x, 1024, out),
        lambda kernels, payload, out, weight, adds: kernels.sign_decode(payload, 1024, out, weight, adds),
    )


@given(gradients(), st.sampled_from([None, 0.1, 0.5, 1.0]))
@examples
def test_trits_are_the_same_in_both(compiled: Kernels, x: Tensor, threshold: float | None) -> None:
    def encode(kernels: Kernels, out: Tensor) -> None:
        if threshold is None:
            kernels.ternary_draw(x, 1280, KEY, OFFSET, out)
        else:
            kernels.ternary_encode(x, 1280, threshold, out)

    assert_twins(
        compiled,
        x.numel(),
        4 * heads(x, 1280) + x.numel() // 1280 * 256 + trit_bytes(x.numel() % 1280),
        encode,
        lambda kernels, payload, out, weight, adds: kernels.ternary_decode(payload, 1280, out, weight, adds),
    )


@given(gradients())
@examples
def test_powers_of_two_are_the_same_in_both(compiled: Kernels, x: Tensor) -> None:
    assert_twins(
        compiled,
        x.numel(),
        heads(x, 1024) + x.numel(),
        lambda kernels, out: kernels.natural_encode(x, 1024, KEY, OFFSET, out),
        lambda kernels, payload, out, weight, adds: kernels.natural_decode(payload, 1024, out, weight, adds),
    )


@given(gradients().filter(lambda x: x.numel() > 0), st.integers(2, 256))
@examples
def test_codebooks_are_the_same_in_both(compiled: Kernels, x: Tensor, num_entries: int) -> None:
    ours, theirs = compiled.histogram(x), TorchKernels().histogram(x)
    assert ours.largest == theirs.largest
    assert torch.equal(ours.counts, theirs.counts)
    assert torch.equal(ours.sums, theirs.sums)
    generator = torch.Generator().manual_seed(num_entries)
    entries = torch.randint(0, num_entries, (NUM_BINS,), generator=generator).to(torch.uint8)
    codebook, bits = torch.randn(num_entries, generator=generator), (num_entries - 1).bit_length()
    assert_twins(
        compiled,
        x.numel(),
        blocks_packed_bytes(x.numel(), 1024, bits),
        lambda kernels, out: kernels.codebook_encode(x, 1024, ours.largest, entries, bits, out),
        lambda kernels, payload, out, weight, adds: kernels.codebook_decode(payload, 1024, codebook, out, weight, adds),
    )


def test_a_histogram_of_many_elements_is_exact(compiled: Kernels) -> None:
    x = torch.ones(200_000)  # more than one word can count
    found = compiled.histogram(x)
    assert int(found.counts[511]) == 200_000
    assert int(found.sums[511]) == 200_000 * 2**23
    assert int(found.counts.sum()) == 200_000


@pytest.mark.parametrize("kernels", [compiled_kernels(), TorchKernels()])
def test_impossible_payloads_are_reported(kernels: Kernels | None) -> None:
    if kernels is None:
        pytest.skip("the kernels were not built")
    out = torch.empty(10)
    nan = torch.full((1,), torch.nan).view(torch.uint8)
    negative = torch.full((1,), -1.0).view(torch.uint8)
    for head in (nan, negative):
        assert not kernels.int8_decode(torch.cat([head, torch.zeros(10, dtype=torch.uint8)]), 256, out, 1.0, False)
        assert not kernels.sign_decode(torch.cat([head, torch.zeros(2, dtype=torch.uint8)]), 1024, out, 1.0, False)
        assert not kernels.ternary_decode(torch.cat([head, torch.zeros(2, dtype=torch.uint8)]), 1280, out, 1.0, False)
        step = torch.cat([torch.zeros(4, dtype=torch.uint8), head, torch.zeros(10, dtype=torch.uint8)])
        assert not kernels.nbit_decode(step, 512, 8, out, 1.0, False)
    trits = torch.tensor([0, 0, 0, 0, 243, 0], dtype=torch.uint8)
    assert not kernels.ternary_decode(trits, 1280, out, 1.0, False)
    assert not kernels.natural_decode(torch.full((11,), 255, dtype=torch.uint8), 1024, out, 1.0, False)
    codes = torch.full((3,), 255, dtype=torch.uint8)
    assert not kernels.codebook_decode(codes, 1024, torch.zeros(3), out, 1.0, False)
