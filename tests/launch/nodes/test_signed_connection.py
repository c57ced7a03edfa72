from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.trust.handshake import HELLO_BYTES, MAC_BYTES
from torsh_distributed.errors import SerializationError
from torsh_distributed.launch.local.job_failure import JobFailure
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.nodes.records import (
    End,
    Failed,
    Finished,
    Heartbeat,
    JoinRequest,
    Message,
    Start,
    Stop,
    decode,
    encode,
)
from torsh_distributed.launch.nodes.signed_connection import BadRecord, Connection, RecordCodec

FAILURE = JobFailure(
    node_rank=1, node_name="n", rank=3, cause="c", last_lines=("a", "ü"), finished_before=((2, 1.5),), step=4
)
MESSAGES: list[Message] = [
    JoinRequest(
        node_rank=1,
        node_name="n",
        nnodes=2,
        nproc_per_node=4,
        max_restarts=0,
        run_id="r",
        python="3.11.2",
        torch="2.13.0",
        torsh="0.1.0",
        clock_s=1.5,
    ),
    Failed(attempt=1, failure=FAILURE),
    Finished(attempt=0),
    Heartbeat(),
    Start(attempt=0, master_addr="a", master_port=1),
    Stop(attempt=0, failure=FAILURE),
    End(exit_code=137, failure=FAILURE, signal=None),
]


def pair(token: str = "secret", other: str = "secret") -> tuple[RecordCodec, RecordCodec]:
    server, client = RecordCodec(token, is_server=True), RecordCodec(other, is_server=False)
    assert server.feed(client.take_outgoing()) == []
    assert client.feed(server.take_outgoing()) == []
    assert server.feed(client.take_outgoing()) == []
    assert server.is_ready
    return server, client


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_every_record_travels_as_json_and_arrives_equal(message: Message) -> None:
    assert json.loads(encode(message))["kind"] == message.kind
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'{"kind": "unknown"}',
        b'{"kind": "finished"}',
        b'{"kind": "finished", "attempt": "0"}',
        b'{"kind": "finished", "attempt": 0, "more": 1}',
        b'{"kind": "join_refused", "reason": "' + b"x" * 5000 + b'"}',
        b"\x80\x04K\x01.",
    ],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(SerializationError, match="not understood"):
        decode(data)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_records_arrive_in_order_however_the_stream_is_cut(sizes: list[int]) -> None:
    server, client = pair()
    data = b"".join(server.seal(message) for message in MESSAGES)
    arrived: list[Message] = []
    for size in sizes:
        arrived += client.feed(data[:size])
        data = data[size:]
    assert arrived + client.feed(data) == MESSAGES


@given(position=st.integers(0, 200), flip=st.integers(1, 255))
def test_no_changed_byte_passes(position: int, flip: int) -> None:
    server, client = pair()
    data = bytearray(server.seal(MESSAGES[0]))
    data[position % len(data)] ^= flip
    try:
        arrived = client.feed(bytes(data))
    except BadRecord:
        return
    # A longer length only makes the codec wait for the rest.
    assert arrived == []


def test_a_record_cannot_be_replayed_reordered_or_sent_back() -> None:
    server, client = pair()
    first, second = server.seal(Heartbeat()), server.seal(Finished(attempt=0))
    with pytest.raises(BadRecord, match="not signed"):
        client.feed(second)
    server, client = pair()
    first = server.seal(Heartbeat())
    assert client.feed(first) == [Heartbeat()]
    with pytest.raises(BadRecord, match="not signed"):
        client.feed(first)
    server, client = pair()
    with pytest.raises(BadRecord, match="not signed"):
        server.feed(server.seal(Heartbeat()))


def test_a_record_of_another_connection_is_not_taken() -> None:
    server, _ = pair()
    _, other_client = pair()
    with pytest.raises(BadRecord, match="not signed"):
        other_client.feed(server.seal(Heartbeat()))


def test_another_token_is_not_taken() -> None:
    with pytest.raises(BadRecord, match="does not have the job's secret"):
        pair("one", "two")
    with pytest.raises(BadRecord, match="before the proof"):
        RecordCodec("one", is_server=False).seal(Heartbeat())


def test_strangers_and_giants_are_turned_away() -> None:
    with pytest.raises(BadRecord, match="different protocol"):
        RecordCodec("t", is_server=True).feed(b"GET / HTTP/1.1\r\n")
    server, _ = pair()
    with pytest.raises(BadRecord, match="too long"):
        server.feed(struct.pack("!I", 1 << 30) + b"\0" * 32)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=10)
        server, _ = listener.accept()
    yield server, client
    server.close()
    client.close()


def test_two_ends_talk_in_one_loop(sockets: tuple[socket.socket, socket.socket]) -> None:
    heard: list[Message] = []
    with Loop() as loop:
        server = Connection(loop, sockets[0], "t", is_server=True)
        client = Connection(loop, sockets[1], "t", is_server=False)

        def answer(message: Message) -> None:
            heard.append(message)
            server.send(End(exit_code=0))

        def end(message: Message) -> None:
            heard.append(message)
            client.close()

        server.on_message = answer
        server.on_close = lambda reason: (heard.append(Heartbeat()), loop.stop(0))
        client.on_message = end
        client.send(Finished(attempt=0))
        loop.call_later(10, lambda: loop.stop(1))
        assert loop.run() == 0
    assert heard == [Finished(attempt=0), End(exit_code=0), Heartbeat()]


def test_a_stranger_closes_the_connection_with_the_reason(sockets: tuple[socket.socket, socket.socket]) -> None:
    reasons: list[str] = []
    with Loop() as loop:
        server = Connection(loop, sockets[0], "t", is_server=True)
        server.on_close = lambda reason: (reasons.append(reason), loop.stop(0))
        sockets[1].sendall(b"hello, are you redis?\r\n")
        loop.call_later(10, lambda: loop.stop(1))
        assert loop.run() == 0
    assert "different protocol" in reasons[0]


def prove(codec: RecordCodec, sock: socket.socket) -> None:
    sock.sendall(codec.take_outgoing())
    codec.feed(sock.recv(HELLO_BYTES + MAC_BYTES, socket.MSG_WAITALL))
    sock.sendall(codec.take_outgoing())


def test_finish_sends_what_is_queued(sockets: tuple[socket.socket, socket.socket]) -> None:
    codec = RecordCodec("t", is_server=False)
    with Loop() as loop:
        server = Connection(loop, sockets[0], "t", is_server=True)
        proving = threading.Thread(target=prove, args=(codec, sockets[1]))
        proving.start()
        loop.call_later(0.2, lambda: loop.stop(0))
        loop.run()
        proving.join()
        server.send(End(exit_code=7))
        server.finish(timeout_s=5)
        data = b""
        while piece := sockets[1].recv(1000):
            data += piece
    assert codec.feed(data) == [End(exit_code=7)]
