"""What only the TCP store can get wrong: who may connect, what is at the other end, and what happens when it goes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.ports import free_port
from torsh_distributed.comm.store import TcpStoreServer, open_store
from torsh_distributed.comm.store.tcp import tcp_protocol
from torsh_distributed.comm.trust.handshake import HELLO_BYTES, MAC_BYTES, Handshake
from torsh_distributed.errors import CommunicationError, InvalidArgument, IoError, OperationTimeout
from torsh_distributed.plan import RetryConfig

pytestmark = pytest.mark.ranks  # a server is started


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def listening_addresses(port: int) -> set[str]:
    """The local addresses, in the kernel's hexadecimal, on which someone listens on this port."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, hex_port = local.partition(":")
            if state == "0A" and int(hex_port, 16) == port:
                found.add(address)
    return found


def test_the_server_listens_on_loopback_alone(tcp_url: str) -> None:
    assert listening_addresses(port_of(tcp_url)) == {"0100007F"}


def test_the_store_inside_for_plain_clients_listens_on_loopback_alone() -> None:
    others = _own_listeners()
    with TcpStoreServer() as server:
        plain = dist.TCPStore("127.0.0.1", port_of(server.url), is_master=False, timeout=timedelta(seconds=30))
        plain.set("key", "1")
        own = _own_listeners() - others
        assert len(own) == 2
        assert {address for address, _ in own} == {"127.0.0.1"}


def _own_listeners() -> set[tuple[str, int]]:
    import psutil

    connections = psutil.Process().net_connections("tcp")
    return {tuple(entry.laddr) for entry in connections if entry.status == psutil.CONN_LISTEN}


def test_a_wildcard_address_is_obeyed_and_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), open_store("tcp://0.0.0.0:0", is_server=True) as store:
        store.set("key", "1")
        assert store.url.startswith("tcp://127.0.0.1:")
        assert listening_addresses(port_of(store.url)) == {"00000000"}
    assert "requires no token" in caplog.text


def test_ipv6_loopback_works() -> None:
    try:
        with open_store("tcp://[::1]:0", is_server=True) as store, open_store(store.url) as client:
            client.set("key", "1")
            assert store.get("key") == b"1"
    except IoError as error:
        pytest.skip(f"no IPv6 loopback here: {error.message}")


def test_a_port_in_use_is_reported(tcp_url: str) -> None:
    with pytest.raises(IoError, match="cannot listen") as caught:
        open_store(tcp_url, is_server=True)
    assert "another port" in str(caught.value)


def test_an_address_of_another_node_is_reported() -> None:
    with pytest.raises(IoError, match="cannot listen"):
        open_store("tcp://192.0.2.1:0", is_server=True)


def test_an_unreachable_server_is_reported_within_the_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(CommunicationError, match="no store answers") as caught:
        open_store(f"tcp://127.0.0.1:{free_port()}", timeout_s=0.3)
    assert time.monotonic() - began < 5
    assert "torsh store serve" in str(caught.value)


def test_an_unknown_host_is_reported() -> None:
    with pytest.raises(CommunicationError, match="no store answers"):
        open_store("tcp://no-such-host.invalid:1", timeout_s=0.3)


def test_a_client_waits_for_a_server_that_starts_late() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_store, f"tcp://127.0.0.1:{port}", timeout_s=20)
        time.sleep(0.1)
        with TcpStoreServer("127.0.0.1", port), opening.result(timeout=20) as store:
            store.set("key", "1")
            assert store.get("key") == b"1"


def test_something_else_at_the_port_is_told_from_a_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer_in_another_language() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" + b"x" * 100)

        answering = pool.submit(answer_in_another_language)
        with pytest.raises(InvalidArgument, match="not a torsh store"):
            open_store(f"tcp://127.0.0.1:{listener.getsockname()[1]}", timeout_s=5)
        answering.result()


def test_a_plain_torch_store_does_not_pass_for_ours() -> None:
    torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(OperationTimeout, match="did not greet like a torsh store"):
        open_store(f"tcp://127.0.0.1:{torchs.port}", timeout_s=0.3)


@pytest.mark.parametrize(("ours", "theirs"), [("right", "wrong"), ("right", None), (None, "wrong")])
def test_another_token_is_refused(ours: str | None, theirs: str | None) -> None:
    with TcpStoreServer(token=ours) as server:
        with pytest.raises(InvalidArgument, match="a different token"):
            open_store(server.url, token=theirs)
        with open_store(server.url, token=ours) as store:
            store.set("key", "1")


def test_a_client_that_skips_the_proof_is_sent_away(caplog: pytest.LogCaptureFixture) -> None:
    with TcpStoreServer(token="right") as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as peer:
            peer.sendall(tcp_protocol.MAGIC + b"\0" + b"n" * 32 + b"p" * MAC_BYTES)
            peer.sendall(tcp_protocol.frame(b"f" + tcp_protocol.encode([b"set", b"key", b"value", None])))
            with contextlib.suppress(ConnectionResetError):
                while peer.recv(4096):
                    pass
        with open_store(server.url, token="right") as store:
            assert store.num_keys() == 0
    assert "does not have the job's secret" in caplog.text


def test_plain_torch_clients_are_refused_where_a_token_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with TcpStoreServer(token="right") as server, socket.create_connection(("127.0.0.1", server.port), 10) as peer:
        peer.sendall(b"\x00\x01\x02\x03\x04")
        assert peer.recv(1) == b""
    assert "it speaks a different protocol" in caplog.text


@pytest.mark.parametrize(
    "garbage",
    [
        tcp_protocol.MAGIC[:3],
        tcp_protocol.MAGIC + b"short",
        b"TORSHKV9" + b"n" * 16,
        b"T" * 4096,
    ],
)
def test_garbage_at_the_greeting_does_not_harm_the_server(tcp_url: str, garbage: bytes) -> None:
    with open_store(tcp_url) as store:
        with socket.create_connection(("127.0.0.1", port_of(tcp_url)), 10) as peer:
            peer.sendall(garbage)
        store.set("key", "1")
        assert store.get("key") == b"1"


@pytest.mark.parametrize(
    "data",
    [
        tcp_protocol.FRAME_HEADER.pack(2**32 - 1),
        tcp_protocol.frame(b""),
        tcp_protocol.frame(b"abc"),
        tcp_protocol.frame(b"s"),
        tcp_protocol.frame(b"s\xff\xff\xff\xff"),
        tcp_protocol.frame(b"g\xff\xfe"),
        tcp_protocol.frame(b"f"),
        tcp_protocol.frame(b"fabc"),
        tcp_protocol.frame(b"f" + tcp_protocol.encode([b"format", b"disk"])),
        tcp_protocol.frame(b"f" + tcp_protocol.encode([b"set", b"key"])),
        tcp_protocol.frame(b"f" + tcp_protocol.encode([b"wait"])),
        tcp_protocol.frame(b"f" + tcp_protocol.encode([b"wait", b"soon", b"key"])),
        tcp_protocol.frame(b"f" + tcp_protocol.encode([b"set", b"\xff\xfe", b"value", None])),
        tcp_protocol.frame(b"a123"),
        tcp_protocol.frame(b"c\xff"),
        tcp_protocol.frame(b"f" + tcp_protocol.encode([None])),
    ],
)
def test_a_malformed_request_ends_its_own_connection_only(tcp_url: str, data: bytes) -> None:
    with open_store(tcp_url) as store:
        with greeted(port_of(tcp_url)) as peer:
            peer.sendall(data)
            assert peer.recv(4096) == b""
        store.set("key", "1")
        assert store.get("key") == b"1"


@contextmanager
def greeted(port: int) -> Iterator[socket.socket]:
    """A raw connection past the greeting of a server without a token."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        handshake = Handshake(b"", tcp_protocol.MAGIC, is_server=False, wants_signing=False)
        peer.sendall(handshake.opening)
        peer.sendall(handshake.feed(peer.recv(HELLO_BYTES + MAC_BYTES, socket.MSG_WAITALL)))
        yield peer


@given(body=st.binary(max_size=60))
def test_any_bytes_decode_or_are_refused(body: bytes) -> None:
    try:
        parts = tcp_protocol.decode(body)
    except ValueError:
        return
    assert tcp_protocol.encode(parts) == body


def test_a_value_of_many_frames_comes_back_whole(tcp_url: str) -> None:
    value = bytes(range(256)) * 40_000
    with open_store(tcp_url) as store:
        store.set("large", value)
        assert store.get("large") == value
        assert store.multi_get(["large", "large"]) == [value, value]


def test_a_write_is_seen_by_whatever_the_client_asks_next(tcp_url: str) -> None:
    with open_store(tcp_url) as store:
        for number in range(200):
            store.set(f"key-{number}", str(number))
            assert store.check([f"key-{number}"])
        assert store.num_keys() == 200


def test_threads_that_wait_do_not_hold_up_the_others(tcp_url: str) -> None:
    with open_store(tcp_url) as store, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(store.get, f"key-{number}", timeout_s=20) for number in range(4)]
        store.add("counter", 1)
        for number in range(4):
            store.set(f"key-{number}", str(number))
        assert [future.result(timeout=20) for future in waiting] == [b"0", b"1", b"2", b"3"]


def connections_to(port: int) -> int:
    """How many connections this process's clients have to the server."""
    import psutil

    return sum(
        entry.status == psutil.CONN_ESTABLISHED and entry.raddr.port == port
        for entry in psutil.Process().net_connections("tcp")
        if entry.raddr
    )


def test_a_client_that_waits_alone_has_one_connection_and_others_open_theirs_meanwhile(tcp_url: str) -> None:
    with open_store(tcp_url) as store, open_store(tcp_url) as other, ThreadPoolExecutor(1) as pool:
        other.set("there", "1")
        assert store.get("there", timeout_s=20) == b"1"
        assert connections_to(port_of(tcp_url)) == 2
        store.set("before", "1")
        waiting = pool.submit(store.get, "key", timeout_s=60)
        while not store.check(["before"]) or connections_to(port_of(tcp_url)) < 3:
            assert not waiting.done()
        store.set("key", "2")
        assert waiting.result(timeout=60) == b"2"
        for _ in range(3):
            assert store.get("key", timeout_s=20) == b"2"
        assert connections_to(port_of(tcp_url)) == 3, "both are used again"


def test_a_server_without_files_for_more_says_so_and_serves_those_it_has() -> None:
    command = [sys.executable, "-c", FEW_FILES + SERVE]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            url = server.stdout.readline().strip()
            with contextlib.ExitStack() as stack:
                clients = []
                with ThreadPoolExecutor(1) as pool:
                    told = pool.submit(server.stderr.readline)
                    while not told.done():
                        with contextlib.suppress(OperationTimeout):
                            clients.append(stack.enter_context(open_store(url, timeout_s=1.0)))
                    assert "raise the limit of open files (`ulimit -n`)" in told.result()
                clients[0].set("key", "1")
                assert clients[-1].get("key", timeout_s=30) == b"1"
                clients.pop(0).close()
                stack.enter_context(open_store(url, timeout_s=30))
        finally:
            server.kill()


FEW_FILES = """
import logging, resource
from torsh_distributed.comm.store import TcpStoreServer
logging.basicConfig()
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
"""


def test_a_server_that_ends_releases_who_waits() -> None:
    with ThreadPoolExecutor(1) as pool, TcpStoreServer() as server, open_store(server.url) as store:
        waiting = pool.submit(store.get, "never", timeout_s=60)
        store.set("key", "1")
        server.close()
        with pytest.raises(CommunicationError, match=r"lost|no store answers|closed the connection"):
            waiting.result(timeout=20)
        with pytest.raises(CommunicationError, match="no store answers"):
            store.get("key")


def test_a_new_server_at_the_address_is_found_by_the_next_call() -> None:
    with TcpStoreServer() as first, open_store(first.url) as store:
        store.set("key", "1")
        first.close()
        with TcpStoreServer("127.0.0.1", first.port):
            assert not store.contains("key")
            store.set("key", "2")
            assert store.get("key") == b"2"


@pytest.mark.ranks
def test_a_stopped_server_ends_in_a_timeout() -> None:
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().strip()
            with open_store(url, timeout_s=1.0) as store:
                store.set("key", "1")
                os.kill(server.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)
                with pytest.raises(OperationTimeout, match="did not answer"):
                    store.get("key")
                os.kill(server.pid, signal.SIGCONT)
                with open_store(url) as patient:
                    assert patient.get("key") == b"1"
        finally:
            server.kill()


SERVE = """
import sys
from torsh_distributed.comm.store import TcpStoreServer
with TcpStoreServer() as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


def test_a_question_is_repeated_where_the_server_comes_back() -> None:
    """The server ends and another starts at its address while the client asks; a write is not repeated."""
    port = free_port()
    policy = RetryConfig(max_retries=50, initial_delay_s=0.02, max_delay_s=0.02, total_timeout_s=20)
    server = TcpStoreServer("127.0.0.1", port)
    with open_store(f"tcp://127.0.0.1:{port}", retry=policy) as client, ThreadPoolExecutor(1) as pool:
        client.set("key", "1")
        server.close()
        with pytest.raises(CommunicationError):
            client.add("count", 1)
        asking = pool.submit(client.num_keys)
        time.sleep(0.1)
        with TcpStoreServer("127.0.0.1", port):
            assert asking.result(timeout=20) == 0
