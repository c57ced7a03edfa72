"""Sorted indices as bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.compress.examples import examples
from torsh_distributed.compress.messages import indices as indices_module
from torsh_distributed.compress.messages.indices import (
    decode_indices,
    encode_indices,
    index_layout,
    pack_bits,
    unpack_bits,
)
from torsh_distributed.errors import CompressionError


@pytest.fixture(params=["compiled", "portable"], autouse=True, scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything holds for the compiled kernels, where they were built, and for the operators they stand for."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "portable":
            patch.setattr(indices_module, "compiled_module", lambda: None)
        yield


def a_set(num_elements: int, density: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(num_elements, generator=generator) < density).nonzero().squeeze(1)


@examples
@given(st.integers(0, 3000), st.sampled_from([0.0, 0.0005, 0.01, 0.2, 0.5, 0.9, 1.0]), st.integers(0, 9))
def test_every_set_comes_back_in_the_bytes_foretold(num_elements: int, density: float, seed: int) -> None:
    indices = a_set(num_elements, density, seed)
    packed = encode_indices(indices, num_elements)
    assert packed.numel() == index_layout(num_elements, indices.numel()).num_bytes
    assert torch.equal(decode_indices(packed, num_elements, indices.numel()), indices)


@examples
@given(st.sets(st.integers(0, 2**32 - 2), min_size=1, max_size=20))
def test_places_up_to_the_largest_message_come_back(places: set[int]) -> None:
    indices = torch.tensor(sorted(places))
    packed = encode_indices(indices, 2**32 - 1)
    assert torch.equal(decode_indices(packed, 2**32 - 1, indices.numel()), indices)


@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.1, 0.3, 0.5])
def test_the_size_is_close_to_the_entropy(density: float) -> None:
    num_elements = 1_000_000
    entropy = -density * math.log2(density) - (1 - density) * math.log2(1 - density)
    num_bits = index_layout(num_elements, int(density * num_elements)).num_bytes * 8
    assert entropy * num_elements <= num_bits <= 1.17 * entropy * num_elements


def test_an_index_takes_less_than_9_bits_at_one_percent() -> None:
    assert index_layout(1_000_000, 10_000).num_bytes * 8 / 10_000 == pytest.approx(8.5625, abs=0.001)


@examples
@given(st.lists(st.booleans(), max_size=70))
def test_bits_come_back_from_bytes(values: list[bool]) -> None:
    bits = torch.tensor(values, dtype=torch.uint8)
    assert torch.equal(unpack_bits(pack_bits(bits), len(values)), bits)


@pytest.mark.parametrize("density", [0.01, 0.4])
def test_damaged_indices_are_refused(density: float) -> None:
    indices = a_set(1000, density, seed=1)
    packed = encode_indices(indices, 1000)
    with pytest.raises(CompressionError, match="wrong length"):
        decode_indices(packed[:-1], 1000, indices.numel())
    packed[-1] ^= 1
    with pytest.raises(CompressionError, match="number of indices differs"):
        decode_indices(packed, 1000, indices.numel())


def test_indices_out_of_order_are_refused() -> None:
    packed = encode_indices(torch.tensor([64, 65]), 1000)
    packed[:-1] = 0  # the high bits of both stay the same, and now the low bits too: one index twice
    with pytest.raises(CompressionError, match="out of order"):
        decode_indices(packed, 1000, 2)


@examples
@given(st.integers(1, 3000), st.sampled_from([0.0005, 0.01, 0.2, 0.5, 0.9]), st.integers(0, 9))
def test_both_write_the_same_bytes(num_elements: int, density: float, seed: int) -> None:
    indices = a_set(num_elements, density, seed)
    written = encode_indices(indices, num_elements)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indices_module, "compiled_module", lambda: None)
        assert torch.equal(written, encode_indices(indices, num_elements))
