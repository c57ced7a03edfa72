"""Packed floats: every bit comes back, whatever the bits; nothing is written beyond the room that was told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torsh_distributed.comm.backends.shm.core import load_native

native = load_native()
pytestmark = pytest.mark.skipif(native is None, reason="the compiled core is not built")

BLOCK = 4096
# As in pack.c: the most exponents that may follow a block, and the mark of one that is copied.
MOST_ELSEWHERE, COPIED = 4 * BLOCK - 2 * BLOCK - BLOCK - 3 * BLOCK // 8 - 8, 2**32 - 1
_GUARD = 64


def packed(bits: Tensor) -> Tensor:
    """The message of floats with these bits (int32)."""
    assert native is not None
    room = native.packed_room(bits.numel())
    message = torch.full((room + _GUARD,), 0xA5, dtype=torch.uint8)
    num_bytes = native.pack(bits.data_ptr(), bits.numel(), message.data_ptr())
    assert num_bytes <= room
    assert (message[room:] == 0xA5).all(), "written beyond the room"
    return message[:num_bytes].clone()


def unpacked(message: Tensor, numel: int) -> Tensor | None:
    """The bits of a message that lies at the beginning of room for any; None if there is none."""
    assert native is not None
    room = torch.zeros(max(native.packed_room(numel), message.numel()), dtype=torch.uint8)
    room[: message.numel()] = message
    bits = torch.full((numel + _GUARD,), -1, dtype=torch.int32)
    is_whole = native.unpack(room.data_ptr(), numel, bits.data_ptr())
    assert (bits[numel:] == -1).all(), "written beyond the floats"
    return bits[:numel] if is_whole else None


numels = st.one_of(st.integers(0, 50), st.sampled_from([n * BLOCK + d for n in (1, 2, 3) for d in (-1, 0, 1, 77)]))
exponents = st.lists(st.integers(0, 255), min_size=1, max_size=12)


@given(numel=numels, choices=exponents, seed=st.integers(0, 2**32 - 1))
def test_every_bit_comes_back(numel: int, choices: list[int], seed: int) -> None:
    """Any sign and mantissa, with exponents from few to many: NaNs, infinities, subnormals and zeros are among them."""
    random = np.random.default_rng(seed)
    rest = random.integers(0, 2**32, numel, dtype=np.uint32) & np.uint32(0x807FFFFF)
    bits = torch.from_numpy((rest | random.choice(choices, numel).astype(np.uint32) << np.uint32(23)).view(np.int32))
    back = unpacked(packed(bits), numel)
    assert back is not None
    assert torch.equal(back, bits)


@given(
    special=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40),
    start=st.integers(0, 2 * BLOCK),
)
def test_single_odd_values_among_usual_ones_come_back(special: list[int], start: int) -> None:
    bits = torch.randn(2 * BLOCK + 40, generator=torch.Generator().manual_seed(0)).view(torch.int32)
    bits[start : start + len(special)] = torch.tensor(special, dtype=torch.int32)
    back = unpacked(packed(bits), bits.numel())
    assert back is not None
    assert torch.equal(back, bits)


def test_normal_values_shrink_and_random_bits_do_not_grow() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64 * BLOCK, generator=generator)
    noise = torch.randint(-(2**31), 2**31, (64 * BLOCK,), generator=generator).to(torch.int32)
    assert packed(normal.view(torch.int32)).numel() < 27.5 / 32 * normal.nbytes
    assert packed(noise).numel() < 1.001 * noise.nbytes
    mixed = torch.cat([normal.view(torch.int32), noise])
    assert packed(mixed).numel() < 30 / 32 * mixed.nbytes


def test_a_message_of_another_length_is_told() -> None:
    message = packed(torch.zeros(2 * BLOCK, dtype=torch.int32))
    assert unpacked(message, 3 * BLOCK) is None
    assert unpacked(message, BLOCK + 1) is None


counts = st.one_of(st.integers(0, 2**32 - 1), st.integers(0, MOST_ELSEWHERE + 2), st.just(COPIED))


@given(base=st.integers(0, 2**32 - 1), count=counts, numel=st.integers(1, 2 * BLOCK))
def test_what_is_no_message_is_told_or_stays_within_bounds(base: int, count: int, numel: int) -> None:
    """A first block that says it is stored in another way: `unpacked` also looks beyond the floats."""
    message = packed(torch.zeros(numel, dtype=torch.int32))
    message[8:16] = torch.from_numpy(np.array([base, count], dtype=np.uint32).view(np.uint8))
    found = unpacked(message, numel)
    if count != COPIED and (numel < BLOCK or count > MOST_ELSEWHERE):
        assert found is None, "no block is stored like this"
    elif numel < BLOCK:
        assert found is not None
        assert not found.any(), "it is what it says: copied"
