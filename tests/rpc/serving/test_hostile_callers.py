"""Callers that do harm: strangers get nothing, members that send nonsense are cut off, and memory is bounded."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgpack
import pytest

from tests.rpc import exposed_functions as there
from tests.rpc.conftest import MakeWorker
from torsh_distributed.comm.transport.connection import Connection, open_socket
from torsh_distributed.comm.transport.frames import BadFrame, FrameLimits
from torsh_distributed.rpc import RpcWorker
from torsh_distributed.rpc.messages.encoding import TABLE_BYTES
from torsh_distributed.rpc.messages.lane_pair import CALL, HELLO, PROTOCOL
from torsh_distributed.rpc.serving import call_server

LIMITS = FrameLimits(head_bytes=1 << 24, payload_bytes=1 << 40)


@contextmanager
def member(worker: RpcWorker, *, lanes: tuple[str, ...] = ("small", "payload")) -> Iterator[dict[str, Connection]]:
    """The lanes of a caller that knows the secret, for sending what a Link would not."""
    address = worker.info.unix_name
    opened = {
        name: Connection.connect(address, worker.directory.secret(), PROTOCOL, limits=LIMITS, timeout_s=10)
        for name in lanes
    }
    for name, lane in opened.items():
        lane.send([HELLO, "link of a test", name, "stranger"])
    try:
        yield opened
    finally:
        for lane in opened.values():
            lane.close()


def call_head(*args: object, name: str = "tests.rpc.exposed_functions:add") -> bytes:
    return TABLE_BYTES.pack(0) + msgpack.packb([CALL, 1, name, 10.0, list(args), {}])


def frame(head: bytes, num_payload: int = 0) -> bytes:
    return struct.pack("!IQ", len(head), num_payload) + head


def read(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        data += sock.recv(num_bytes - len(data))
    return bytes(data)


HOSTILE = {
    "a head of 4 GB": struct.pack("!IQ", 2**32 - 1, 0),
    "a payload of 16 EB": struct.pack("!IQ", 10, 2**64 - 1),
    "no message": frame(TABLE_BYTES.pack(0) + b"\xc1"),
    "nesting": frame(TABLE_BYTES.pack(0) + b"\x91" * 100_000),
    "a million keys": frame(TABLE_BYTES.pack(0) + b"\xdf\x00\x0f\x42\x40" + b"\xc0" * 500_000),
    "a call with a name for arguments": frame(TABLE_BYTES.pack(0) + msgpack.packb([CALL, 1, "x", 1.0, "args", {}])),
    "a text for a number": frame(TABLE_BYTES.pack(0) + msgpack.packb([CALL, "one", "x", 1.0, [], {}])),
    "kwargs with a number": frame(TABLE_BYTES.pack(0) + msgpack.packb([CALL, 1, "x", 1.0, [], {1: 2}])),
    "an unannounced payload": frame(call_head(1, 2), 1000),
    "a tensor larger than its payload": frame(
        TABLE_BYTES.pack(len(table := msgpack.packb([[0, 0, 2**40]]))) + table + msgpack.packb([CALL, 1]), 8
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nonsense_costs_its_sender_the_connection_and_others_nothing(
    caller: RpcWorker, make_worker: MakeWorker, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    victim = make_worker("victim")
    with member(victim) as lanes, caplog.at_level(logging.WARNING):
        lanes["small"]._sock.sendall(HOSTILE[what])
        with pytest.raises(OSError, match=r"closed|reset"):
            lanes["small"].receive()
    assert "stranger" in caplog.text
    assert caller.call("victim", there.add, (1, 2)) == 3
    assert victim._server.num_links == 1


def test_a_million_keys_that_are_whole_are_too_long_a_head(make_worker: MakeWorker) -> None:
    victim = make_worker("victim")
    with member(victim) as lanes, pytest.raises(OSError, match=r"closed|reset|pipe"):
        lanes["small"]._sock.sendall(frame(TABLE_BYTES.pack(0) + msgpack.packb({i: i for i in range(10**6)})))
        lanes["small"].receive()


def test_who_lacks_the_secret_gets_in_by_no_door(caller: RpcWorker, make_worker: MakeWorker) -> None:
    victim = make_worker("victim", host="127.0.0.1")
    assert victim.info.tcp_address is not None
    for address in (victim.info.unix_name, victim.info.tcp_address):
        with pytest.raises(BadFrame, match="secret"):
            Connection.connect(address, b"a guess", PROTOCOL, limits=LIMITS, timeout_s=10)
        with open_socket(address, 10) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(100) == b""
    assert caller.call("victim", there.add, (1, 2)) == 3
    assert victim._server.num_links == 1


def test_silent_strangers_keep_nobody_out(caller: RpcWorker, make_worker: MakeWorker) -> None:
    victim = make_worker("victim")
    strangers = [open_socket(victim.info.unix_name, 10) for _ in range(100)]
    assert caller.call("victim", there.add, (1, 2)) == 3
    for stranger in strangers:
        stranger.close()


def test_a_caller_with_one_lane_is_dropped(make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_server, "PROOF_TIMEOUT_S", 0.1)
    victim = make_worker("victim")
    with member(victim, lanes=("small",)) as lanes, pytest.raises(OSError, match="closed"):
        lanes["small"].receive()


def test_a_caller_that_does_not_read_is_not_read_from_and_memory_stays_bounded(
    caller: RpcWorker, make_worker: MakeWorker
) -> None:
    victim = make_worker("victim")
    head = TABLE_BYTES.pack(0) + msgpack.packb([CALL, 1, "tests.rpc.exposed_functions:echo", 60.0, ["x" * 400_000], {}])
    with member(victim) as lanes:
        sock = lanes["small"]._sock
        sock.settimeout(0.5)
        num_sent = 0
        with pytest.raises(TimeoutError):  # its socket takes no more, since nobody reads it
            while num_sent < 500:
                sock.sendall(frame(head))
                num_sent += 1
        link = next(iter(victim._server._links.values()))
        assert link.pair.num_unsent < 3 * call_server._MOST_UNSENT_BYTES
        assert caller.call("victim", there.add, (1, 2)) == 3
        # Once it reads, everything that it had sent whole is answered.
        sock.settimeout(20)
        for _ in range(num_sent):
            num_head, num_payload = struct.unpack("!IQ", read(sock, 12))
            assert num_head > 400_000
            assert read(sock, num_head + num_payload)[-1:] == b"x"


def test_a_flood_of_calls_waits_at_its_caller_and_all_are_answered(caller: RpcWorker, make_worker: MakeWorker) -> None:
    victim = make_worker("victim", num_threads=1)
    there.gates["x"] = threading.Event()
    held = caller.call_async("victim", there.wait_for_gate, ("x",))
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(lambda: [caller.call_async("victim", there.add, (i, 0)) for i in range(5000)])
        link = next(iter(victim._server._links.values()))
        deadline_s = time.monotonic() + 20
        while not link._is_paused and time.monotonic() < deadline_s:
            held.done()
        assert link._is_paused
        assert len(link._calls) < 5000
        assert not sending.done()
        there.gates["x"].set()
        futures = sending.result(60)
    assert held.result() == "x"
    assert [future.result() for future in futures] == list(range(5000))


def test_links_between_nodes_work_as_those_on_one(
    caller: RpcWorker, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between nodes: by port, every frame signed."""
    import torch

    from torsh_distributed.comm.transport import proof
    from torsh_distributed.rpc.directory import WorkerInfo

    monkeypatch.setattr(WorkerInfo, "address", property(lambda info: info.tcp_address))
    monkeypatch.setattr(proof, "is_same_machine", lambda sock: False)
    make_worker("far", host="127.0.0.1")
    sent = torch.arange(1 << 20)
    torch.testing.assert_close(caller.call("far", there.echo_on_a_thread, (sent,)), sent)
    assert caller.call("far", there.echo, ("x",)) == "x"
