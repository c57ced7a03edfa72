"""Sparse messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.compress.examples import examples
from torsh_distributed.compress.messages import indices as indices_module
from torsh_distributed.compress.messages.sparse import (
    Sparse,
    SparseVector,
    add_to,
    decode_sparse,
    densify,
    encode_sparse,
    most_sparse_bytes,
    sparse_bytes,
)
from torsh_distributed.errors import CompressionError

FLOATS16 = st.floats(width=16, min_value=-1000, max_value=1000)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def message_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    indices = x.nonzero().squeeze(1)
    return encode_sparse(Sparse(indices, x[indices]), x.numel(), dtype)


@examples
@given(st.lists(FLOATS | st.just(0.0), max_size=60))
def test_fp32_values_come_back_bit_for_bit(values: list[float]) -> None:
    x = torch.tensor(values)
    message = message_of(x, torch.float32)
    assert message.numel() == sparse_bytes(x.numel(), int((x != 0).sum()), torch.float32)
    assert torch.equal(densify(decode_sparse(message, x.numel(), torch.float32), x.numel()), x)


@examples
@given(st.lists(FLOATS, min_size=1, max_size=60))
def test_fp16_values_neither_overflow_nor_lose_more_than_their_precision(values: list[float]) -> None:
    x = torch.tensor(values)
    got = densify(decode_sparse(message_of(x, torch.float16), x.numel(), torch.float16), x.numel())
    peak = x.abs().max()
    # Half precision has 11 bits; what is 2**29 times smaller than the largest is rounded to a multiple of it.
    allowed = torch.maximum(x.abs() * 2.0**-11, peak * 2.0**-39).double() + 2.0**-149
    assert ((got.double() - x.double()).abs() <= allowed).all()
    assert got.isfinite().all()


@examples
@given(
    st.lists(st.lists(FLOATS16 | st.just(0.0), min_size=12, max_size=12), min_size=1, max_size=3),
    st.sampled_from([(12,), (5, 7), (1, 0, 11)]),
    st.booleans(),
)
def test_a_sum_of_sparse_vectors_is_written_in_parts_as_torch_adds_it_up(
    vectors: list[list[float]], sizes: tuple[int, ...], is_compiled: bool
) -> None:
    dense_terms = [torch.tensor(values) for values in vectors]
    expected = torch.zeros(12)
    for term in dense_terms:
        expected += term
    places = [term.nonzero().squeeze(1) for term in dense_terms]
    terms = tuple(Sparse(indices, term[indices]) for indices, term in zip(places, dense_terms, strict=True))
    parts = [torch.full((size,), 7.0) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        if not is_compiled:
            patch.setattr(indices_module, "compiled_module", lambda: None)
        vector = SparseVector(terms, 12)
        vector.write_to(parts)
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(vector.dense(), expected)
        assert torch.equal(vector.scaled(0.5).dense(), expected / 2)
        add_to(expected, vector, sign=-1)
    torch.testing.assert_close(expected, torch.zeros(12), rtol=0, atol=1e-2)


def test_a_message_may_begin_anywhere_in_a_buffer() -> None:
    x = torch.tensor([0.0, 1.5, 0.0, -2.0, 0.0])
    message = message_of(x, torch.float16)
    buffer = torch.cat([torch.zeros(3, dtype=torch.uint8), message, torch.ones(5, dtype=torch.uint8)])
    assert torch.equal(densify(decode_sparse(buffer[3:], 5, torch.float16, is_padded=True), 5), x)


@examples
@given(st.integers(1, 500), st.integers(0, 500))
def test_no_smaller_message_is_longer_than_the_most(num_elements: int, most: int) -> None:
    limit = most_sparse_bytes(num_elements, most, torch.float16)
    sizes = [sparse_bytes(num_elements, count, torch.float16) for count in range(min(most, num_elements) + 1)]
    assert max(sizes) == limit


def test_a_message_that_cannot_be_one_is_refused() -> None:
    message = message_of(torch.tensor([0.0, 1.5, 0.0, -2.0, 0.0]), torch.float16)
    with pytest.raises(CompressionError, match="at least a header"):
        decode_sparse(message[:7], 5, torch.float16)
    with pytest.raises(CompressionError, match="has 13 bytes"):
        decode_sparse(message[:-1], 5, torch.float16)
    with pytest.raises(CompressionError, match="of 5 has 17 bytes"):
        decode_sparse(message, 5, torch.float32)
    with pytest.raises(CompressionError, match="header"):
        decode_sparse(message, 1, torch.float16)
    message[4:8] = 255  # the unit is NaN
    with pytest.raises(CompressionError, match="header"):
        decode_sparse(message, 5, torch.float16)


def test_more_elements_than_a_message_can_count_are_refused() -> None:
    with pytest.raises(CompressionError, match="smaller buckets"):
        encode_sparse(Sparse(torch.tensor([0]), torch.ones(1)), 2**32, torch.float16)
