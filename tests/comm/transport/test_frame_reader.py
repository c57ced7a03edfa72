"""The frame parser, fuzzed: frames arrive whole however they are cut, and no bytes make it take memory or crash."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torsh_distributed.comm.transport.frame_reader import FrameReader
from torsh_distributed.comm.transport.frames import BadFrame, FrameLimits, Frames
from torsh_distributed.comm.trust.handshake import Signer

LIMITS = FrameLimits(head_bytes=100_000, payload_bytes=300_000)


def open_in_two_parts(head: memoryview, num_payload: int) -> tuple[Any, list[memoryview]]:
    """The payload goes to two places, as two tensors would."""
    first, second = bytearray(num_payload // 3), bytearray(num_payload - num_payload // 3)
    return (bytes(head), first, second), [memoryview(first), memoryview(second)]


def signers(is_signed: bool) -> tuple[Signer, Signer] | None:
    return (Signer(b"k"), Signer(b"k")) if is_signed else None


def feed(reader: FrameReader, data: bytes, cuts: list[int]) -> list[Any]:
    """Pass `data` in pieces of these lengths, in turns, as a socket would."""
    messages, turn = [], 0
    while data:
        room = reader.room()
        assert 0 < len(room) <= LIMITS.payload_bytes, "room is there, and never more than is allowed"
        num_bytes = min(len(room), len(data), cuts[turn % len(cuts)])
        turn += 1
        room[:num_bytes] = data[:num_bytes]
        messages += reader.take(num_bytes)
        data = data[num_bytes:]
    return messages


FRAMES = st.lists(
    st.tuples(st.binary(max_size=300) | st.integers(0, 99_000).map(bytes), st.integers(0, 1000) | st.just(250_000)),
    max_size=5,
)


@given(frames=FRAMES, is_signed=st.booleans(), cuts=st.lists(st.sampled_from([1, 7, 12, 1000, 1 << 20]), min_size=1))
@settings(max_examples=60)
def test_frames_arrive_whole_however_they_are_cut(
    frames: list[tuple[bytes, int]], is_signed: bool, cuts: list[int]
) -> None:
    cuts = [*cuts, 100_000]  # or a quarter of a megabyte comes byte by byte
    sending = Frames(signers(is_signed), LIMITS)
    payloads = [bytes(range(256)) * (num_bytes // 256 + 1) for _, num_bytes in frames]
    payloads = [payload[:num_bytes] for payload, (_, num_bytes) in zip(payloads, frames, strict=True)]
    data = b"".join(
        bytes(part)
        for (head, _), payload in zip(frames, payloads, strict=True)
        for part in sending.seal(head, [payload])
    )
    reader = FrameReader(Frames(signers(is_signed), LIMITS), open_in_two_parts)
    arrived = feed(reader, data, cuts)
    assert [(head, bytes(first + second)) for head, first, second in arrived] == [
        (head, payload) for (head, _), payload in zip(frames, payloads, strict=True)
    ]
    assert reader.is_between_frames


def bytes_taken(data: bytes, is_signed: bool) -> int:
    """How many of the bytes are in frames that were taken; none if they are refused."""
    reader = FrameReader(Frames(signers(is_signed), LIMITS), open_in_two_parts)
    try:
        arrived = feed(reader, data, [64])
    except BadFrame:
        return 0
    return sum(12 + len(head) + len(first) + len(second) for head, first, second in arrived)


ANY_BYTES = st.binary(max_size=400) | st.tuples(st.integers(0, 40), st.integers(0, 40), st.binary(max_size=200)).map(
    lambda parts: struct.pack("!IQ", parts[0], parts[1]) + parts[2]
)


@given(data=ANY_BYTES, is_signed=st.booleans())
@settings(max_examples=300)
def test_no_bytes_crash_it(data: bytes, is_signed: bool) -> None:
    assert bytes_taken(data, is_signed) <= (0 if is_signed else len(data)), "nobody signs by chance"


@pytest.mark.matrix
@given(data=ANY_BYTES, is_signed=st.booleans())
@settings(max_examples=60_000, derandomize=False, database=None, suppress_health_check=list(HealthCheck))
def test_no_bytes_crash_it_in_a_minute(data: bytes, is_signed: bool) -> None:
    assert bytes_taken(data, is_signed) <= (0 if is_signed else len(data)), "nobody signs by chance"


@given(
    frames=FRAMES.filter(bool),
    place=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
    cut=st.integers(1, 99),
)
@settings(max_examples=100)
def test_a_changed_byte_of_a_signed_stream_is_noticed(
    frames: list[tuple[bytes, int]], place: float, flip: int, cut: int
) -> None:
    sending = Frames(signers(True), LIMITS)
    sent = [(head, bytes(min(num_bytes, 1000))) for head, num_bytes in frames]
    data = bytearray(b"".join(bytes(part) for head, payload in sent for part in sending.seal(head, [payload])))
    data[int(place * len(data))] ^= flip
    reader = FrameReader(Frames(signers(True), LIMITS), open_in_two_parts)
    arrived: list[Any] = []
    try:
        arrived = feed(reader, bytes(data), [cut * 1000])
    except BadFrame:
        return
    assert len(arrived) < len(sent), "a longer frame than was sent is still awaited"
    assert [head for head, _, _ in arrived] == [head for head, _ in sent[: len(arrived)]]


def test_lengths_are_checked_before_memory_is_taken() -> None:
    reader = FrameReader(Frames(None, LIMITS), open_in_two_parts)
    with pytest.raises(BadFrame, match="longer than"):
        feed(reader, b"\xff" * 12, [12])
