"""Connections between two threads over real sockets: payloads arrive where they stay, and nothing forged is taken."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torsh_distributed.comm.transport import proof
from torsh_distributed.comm.transport.connection import Connection
from torsh_distributed.comm.transport.frames import BadFrame, FrameLimits, Frames

PROTOCOL = b"TORSHTST"
LIMITS = FrameLimits(head_bytes=1000, payload_bytes=1 << 24)


def listen() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def accept(listener: socket.socket, secret: bytes = b"secret") -> Connection:
    return Connection.accept(listener.accept()[0], secret, PROTOCOL, limits=LIMITS, timeout_s=10)


def connect(address: Any, secret: bytes = b"secret") -> Connection:
    return Connection.connect(address, secret, PROTOCOL, limits=LIMITS, timeout_s=10)


@contextmanager
def pair() -> Iterator[tuple[Connection, Connection]]:
    with listen() as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener)
        client = connect(listener.getsockname())
        server = accepted.result(10)
    try:
        yield client, server
    finally:
        client.close()
        server.close()


@pytest.fixture(params=["on one machine", "between machines"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Connection, Connection]]:
    if request.param == "between machines":
        monkeypatch.setattr(proof, "is_same_machine", lambda sock: False)
    with pair() as both:
        yield both


def test_heads_and_payloads_arrive(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    client.send({"kind": "x", "n": [1, None, b"\0"]}, b"pay", b"", memoryview(bytearray(b"load")))
    client.send("no payload")
    head, payload = server.receive()
    assert (head, bytes(payload)) == ({"kind": "x", "n": [1, None, b"\0"]}, b"payload")
    assert server.receive()[0] == "no payload"
    server.send(7)
    assert client.receive(waits=True)[0] == 7


def test_a_payload_goes_where_the_receiver_says(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    memory = bytearray(12 << 20)
    sent = bytes(range(256)) * (4 << 12)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(client.send, 5, sent[: 1 << 20], sent[1 << 20 :])
        _, payload = server.receive(lambda head, length: memoryview(memory)[head : head + length])
        sending.result(10)
    assert memory[5 : 5 + len(sent)] == sent
    assert payload.obj is memory


def test_a_payload_that_does_not_fit_is_refused(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    client.send(0, b"12345")
    with pytest.raises(BadFrame, match="5 bytes where 3 were expected"):
        server.receive(lambda head, length: memoryview(bytearray(3)))


def test_who_lacks_the_secret_or_speaks_otherwise_is_refused() -> None:
    with listen() as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, listener)
        with pytest.raises(OSError, match="secret"):
            connect(listener.getsockname(), b"another")
        assert isinstance(accepted.exception(10), OSError)
        accepted = pool.submit(accept, listener)
        with socket.create_connection(listener.getsockname(), timeout=10) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n")
            assert isinstance(accepted.exception(10), BadFrame)


def test_a_changed_payload_is_refused_between_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "is_same_machine", lambda sock: False)
    with pair() as (client, server):
        head, _, signature = client._frames.seal(msgpack.packb(1), [b"payload"])
        client._sock.sendall(bytes(head) + b"paxload" + bytes(signature))
        with pytest.raises(BadFrame, match="not signed"):
            server.receive()


def test_a_head_that_is_too_long_takes_no_memory() -> None:
    with pair() as (client, server):
        client._sock.sendall(struct.pack("!IQ", 1 << 31, 1 << 62))
        with pytest.raises(BadFrame, match="longer than"):
            server.receive()


@given(head=st.binary(max_size=100))
@settings(max_examples=50, deadline=None)
def test_a_head_that_is_no_value_is_refused(head: bytes) -> None:
    try:
        expected = msgpack.unpackb(head)
    except (ValueError, msgpack.UnpackException):
        expected = BadFrame
    with pair() as (client, server):
        client._sock.sendall(b"".join(Frames(None, LIMITS).seal(head)))
        if expected is BadFrame:
            with pytest.raises(BadFrame):
                server.receive()
        else:
            assert repr(server.receive()[0]) == repr(expected)


def test_who_waits_is_woken_when_the_connection_is_cut(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    woken: list[type[BaseException]] = []

    def wait() -> None:
        try:
            server.receive(waits=True)
        except OSError as error:
            woken.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    server.cut()
    waiting.join(10)
    assert woken == [ConnectionResetError]
    with pytest.raises(ConnectionResetError):
        client.receive()


def test_a_silent_stranger_does_not_hold_the_door_open() -> None:
    with listen() as listener, socket.create_connection(listener.getsockname(), timeout=10):
        sock, _ = listener.accept()
        with pytest.raises(TimeoutError):
            Connection.accept(sock, b"secret", PROTOCOL, limits=LIMITS, timeout_s=0.1)
