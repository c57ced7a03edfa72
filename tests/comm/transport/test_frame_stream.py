"""Messages out of a stream: in order however it is cut, and only those that a member has sent."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.transport.frame_stream import FrameStream
from torsh_distributed.comm.transport.frames import BadFrame

PROTOCOL = b"TORSHTST"
MESSAGES = [b"one", b"", b"three" * 40, b"\0\xff"]


def stream(secret: bytes, *, is_server: bool, wants_signing: bool = True) -> FrameStream:
    return FrameStream(secret, PROTOCOL, is_server=is_server, wants_signing=wants_signing, most_bytes=1000)


def pair(
    secret: bytes = b"secret", other: bytes = b"secret", *, wants_signing: bool = True
) -> tuple[FrameStream, FrameStream]:
    server = stream(secret, is_server=True, wants_signing=wants_signing)
    client = stream(other, is_server=False, wants_signing=wants_signing)
    assert server.feed(client.take_outgoing()) == []
    assert client.feed(server.take_outgoing()) == []
    assert server.feed(client.take_outgoing()) == []
    assert server.is_ready
    return server, client


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40), is_signed=st.booleans())
def test_messages_arrive_in_order_however_the_stream_is_cut(sizes: list[int], is_signed: bool) -> None:
    server, client = pair(wants_signing=is_signed)
    data = b"".join(map(server.seal, MESSAGES))
    arrived: list[bytes] = []
    for size in sizes:
        arrived += client.feed(data[:size])
        data = data[size:]
    assert arrived + client.feed(data) == MESSAGES


def test_messages_may_come_right_behind_the_proof() -> None:
    server, client = stream(b"s", is_server=True), stream(b"s", is_server=False)
    server.feed(client.take_outgoing())
    client.feed(server.take_outgoing())
    assert server.feed(client.take_outgoing() + client.seal(b"early")) == [b"early"]


@given(position=st.integers(0, 200), flip=st.integers(1, 255))
def test_no_changed_byte_passes(position: int, flip: int) -> None:
    server, client = pair()
    data = bytearray(server.seal(b"a message"))
    data[position % len(data)] ^= flip
    arrived: list[bytes] = []
    with contextlib.suppress(BadFrame):
        # A longer length only makes it wait for the rest.
        arrived = client.feed(bytes(data))
    assert arrived == []


@given(data=st.binary(max_size=300))
def test_what_a_stranger_sends_never_passes(data: bytes) -> None:
    _, client = pair()
    with contextlib.suppress(BadFrame):
        assert client.feed(data) == []
    server = stream(b"secret", is_server=True)
    with contextlib.suppress(BadFrame):
        assert server.feed(data) == []
    assert not server.is_ready


def test_a_message_cannot_be_replayed_reordered_or_sent_back() -> None:
    server, client = pair()
    first, second = server.seal(b"1"), server.seal(b"2")
    with pytest.raises(BadFrame, match="not signed"):
        client.feed(second)
    server, client = pair()
    first = server.seal(b"1")
    assert client.feed(first) == [b"1"]
    with pytest.raises(BadFrame, match="not signed"):
        client.feed(first)
    server, client = pair()
    with pytest.raises(BadFrame, match="not signed"):
        server.feed(server.seal(b"1"))


def test_a_message_of_another_connection_is_not_taken() -> None:
    server, _ = pair()
    _, other_client = pair()
    with pytest.raises(BadFrame, match="not signed"):
        other_client.feed(server.seal(b"1"))


def test_another_secret_is_not_taken() -> None:
    with pytest.raises(BadFrame, match="does not have the job's secret"):
        pair(b"one", b"two")
    with pytest.raises(BadFrame, match="before the proof"):
        stream(b"one", is_server=False).seal(b"1")


def test_strangers_and_giants_are_turned_away() -> None:
    with pytest.raises(BadFrame, match="different protocol"):
        stream(b"s", is_server=True).feed(b"GET / HTTP/1.1\r\n")
    for lengths in ((1 << 30, 0), (1, 1 << 60)):
        server, _ = pair()
        with pytest.raises(BadFrame, match="longer than"):
            server.feed(struct.pack("!IQ", *lengths))
    server, _ = pair()
    with pytest.raises(BadFrame, match="longer than"):
        server.seal(bytes(1001))
