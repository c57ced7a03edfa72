"""Bytes in fewer bytes."""

from __future__ import annotations

import importlib.util
import struct
import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.world import World
from tests.compress.examples import examples
from torsh_distributed.compress.messages.lossless import (
    Coder,
    broadcast_compressed,
    compress_bytes,
    decompress_bytes,
    is_zstd_available,
)
from torsh_distributed.errors import CompressionError, FeatureNotAvailable, InvalidArgument

CODERS = [coder for coder in Coder if coder is not Coder.ZSTD or is_zstd_available()]
HEADER_BYTES = 20


@examples
@given(st.binary(max_size=300) | st.binary(max_size=4).map(lambda piece: piece * 80), st.integers(1, 9))
def test_every_coder_gives_back_what_it_got(data: bytes, element_bytes: int) -> None:
    for coder in [None, *CODERS]:
        frame = compress_bytes(data, element_bytes=element_bytes, coder=coder)
        assert decompress_bytes(frame) == data
        assert len(frame) <= HEADER_BYTES + len(data)


@pytest.mark.parametrize("coder", [coder for coder in CODERS if coder is not Coder.STORED])
def test_what_repeats_shrinks_and_what_does_not_is_stored(coder: Coder) -> None:
    assert len(compress_bytes(b"state of the optimizer " * 1000, coder=coder)) < 500
    noise = torch.randint(0, 256, (10_000,), dtype=torch.uint8).numpy().tobytes()
    assert len(compress_bytes(noise, coder=coder)) == HEADER_BYTES + 10_000


@pytest.mark.parametrize("coder", [coder for coder in CODERS if coder is not Coder.STORED])
def test_numbers_shrink_more_with_their_bytes_apart(coder: Coder) -> None:
    torch.manual_seed(0)
    data = (torch.randn(50_000) * 0.02).numpy().tobytes()
    apart = len(compress_bytes(data, element_bytes=4, coder=coder))
    assert apart < 0.92 * len(data)
    assert apart < len(compress_bytes(data, coder=coder))


@pytest.mark.parametrize("coder", CODERS)
def test_damage_anywhere_is_found(coder: Coder) -> None:
    frame = compress_bytes(b"the same and the same and the same again" * 4, element_bytes=2, coder=coder)
    for place in range(len(frame)):
        if place == 7:  # reserved
            continue
        damaged = frame[:place] + bytes([frame[place] ^ 0x41]) + frame[place + 1 :]
        with pytest.raises(CompressionError):
            decompress_bytes(damaged, most_bytes=10_000)
    with pytest.raises(CompressionError):
        decompress_bytes(frame[:-1])
    with pytest.raises(CompressionError, match="at least a header"):
        decompress_bytes(frame[:5])


@pytest.mark.parametrize("coder", [coder for coder in CODERS if coder is not Coder.STORED])
def test_a_frame_that_swells_is_refused(coder: Coder) -> None:
    frame = compress_bytes(bytes(1_000_000), coder=coder)
    with pytest.raises(CompressionError, match="more than is allowed"):
        decompress_bytes(frame, most_bytes=999_999)
    lying = struct.pack("<4sBBBxQI", b"TSHZ", 1, coder, 1, 10, zlib.crc32(bytes(10))) + frame[HEADER_BYTES:]
    with pytest.raises(CompressionError, match="damaged"):
        decompress_bytes(lying)


def test_without_the_package_zlib_is_used_and_zstd_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = compress_bytes(bytes(1000), coder=Coder.ZSTD) if is_zstd_available() else None
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "zstandard" else find(name))
    assert compress_bytes(bytes(1000))[5] == Coder.ZLIB
    with pytest.raises(FeatureNotAvailable, match=r"torsh-distributed\[zstd\]"):
        compress_bytes(bytes(1000), coder=Coder.ZSTD)
    if frame is not None:
        with pytest.raises(FeatureNotAvailable, match=r"torsh-distributed\[zstd\]"):
            decompress_bytes(frame)


def test_bad_elements_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="1 to 255"):
        compress_bytes(b"", element_bytes=0)


def broadcast_state() -> dict[str, Any]:
    value = {"step": 7, "weights": torch.arange(3000.0)} if dist.get_rank() == 1 else None
    found: dict[str, Any] = broadcast_compressed(value, 1, element_bytes=4)
    return found


def test_state_reaches_every_rank(world: World) -> None:
    for state in world.run(broadcast_state, num_ranks=2):
        assert state["step"] == 7
        assert torch.equal(state["weights"], torch.arange(3000.0))
