"""Packing: as many bits as promised, and back."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.compress.examples import examples
from torsh_distributed.compress.kernels.bits import (
    blocks_packed_bytes,
    pack,
    pack_trits,
    packed_bytes,
    trit_bytes,
    unpack,
    unpack_trits,
)


@given(st.integers(1, 8), st.integers(1, 5), st.integers(0, 200), st.integers(0, 2**31))
@examples
def test_codes_come_back(bits: int, num_rows: int, num_codes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (num_rows, num_codes), generator=generator).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (num_rows, packed_bytes(num_codes, bits))
    assert torch.equal(unpack(packed, num_codes, bits), codes)


@given(st.integers(1, 5), st.integers(1, 200), st.integers(0, 2**31))
@examples
def test_trits_come_back(num_rows: int, num_trits: int, seed: int) -> None:
    trits = torch.randint(0, 3, (num_rows, num_trits), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack_trits(trits)
    assert packed.shape == (num_rows, trit_bytes(num_trits))
    assert torch.equal(unpack_trits(packed, num_trits), trits)


@given(st.integers(1, 8), st.integers(0, 100_000))
def test_no_bit_is_wasted_but_in_the_last_bytes(bits: int, num_codes: int) -> None:
    least = math.ceil(num_codes * bits / 8)
    assert least <= packed_bytes(num_codes, bits) <= least + 2
    assert packed_bytes(num_codes // 8 * 8, bits) == num_codes // 8 * bits
    assert least <= blocks_packed_bytes(num_codes, 512, bits) <= least + 2
