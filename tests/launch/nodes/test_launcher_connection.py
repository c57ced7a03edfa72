from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from torsh_distributed.comm.transport.frame_stream import FrameStream
from torsh_distributed.comm.trust.handshake import HELLO_BYTES, MAC_BYTES
from torsh_distributed.errors import SerializationError
from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.nodes.launcher_connection import MOST_RECORD_BYTES, PROTOCOL, LauncherConnection
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

FAILURE = EndReport(
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
        server = LauncherConnection(loop, sockets[0], "t", is_server=True)
        client = LauncherConnection(loop, sockets[1], "t", is_server=False)

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
        server = LauncherConnection(loop, sockets[0], "t", is_server=True)
        server.on_close = lambda reason: (reasons.append(reason), loop.stop(0))
        sockets[1].sendall(b"hello, are you redis?\r\n")
        loop.call_later(10, lambda: loop.stop(1))
        assert loop.run() == 0
    assert "different protocol" in reasons[0]


def prove(stream: FrameStream, sock: socket.socket) -> None:
    sock.sendall(stream.take_outgoing())
    stream.feed(sock.recv(HELLO_BYTES + MAC_BYTES, socket.MSG_WAITALL))
    sock.sendall(stream.take_outgoing())


def test_finish_sends_what_is_queued(sockets: tuple[socket.socket, socket.socket]) -> None:
    stream = FrameStream(b"t", PROTOCOL, is_server=False, wants_signing=True, most_bytes=MOST_RECORD_BYTES)
    with Loop() as loop:
        server = LauncherConnection(loop, sockets[0], "t", is_server=True)
        proving = threading.Thread(target=prove, args=(stream, sockets[1]))
        proving.start()
        loop.call_later(0.2, lambda: loop.stop(0))
        loop.run()
        proving.join()
        server.send(End(exit_code=7))
        server.finish(timeout_s=5)
        data = b""
        while piece := sockets[1].recv(1000):
            data += piece
    assert [decode(record) for record in stream.feed(data)] == [End(exit_code=7)]


def test_a_forged_record_closes_the_connection_with_the_reason(sockets: tuple[socket.socket, socket.socket]) -> None:
    reasons: list[str] = []
    stream = FrameStream(b"t", PROTOCOL, is_server=False, wants_signing=True, most_bytes=MOST_RECORD_BYTES)
    with Loop() as loop:
        server = LauncherConnection(loop, sockets[0], "t", is_server=True)
        server.on_close = lambda reason: (reasons.append(reason), loop.stop(0))

        def forge() -> None:
            prove(stream, sockets[1])
            sockets[1].sendall(stream.seal(b"[]"))

        proving = threading.Thread(target=forge)
        proving.start()
        loop.call_later(10, lambda: loop.stop(1))
        assert loop.run() == 0
        proving.join()
    assert "not understood" in reasons[0]
