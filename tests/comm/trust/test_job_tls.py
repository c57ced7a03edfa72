"""TLS whose certificates the job's secret vouches for: made, used, bound, and nobody in between."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from torsh_distributed.comm.store.registry import open_store
from torsh_distributed.comm.store.tcp.tcp_client import TcpKeyspace
from torsh_distributed.comm.store.tcp.tcp_server import TcpStoreServer
from torsh_distributed.comm.trust.job_secret import is_loopback_address
from torsh_distributed.comm.trust.job_tls import JobTls, bound_secret, find_tls, make_certificate
from torsh_distributed.comm.trust.tls_channel import TlsChannel
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, InvalidArgument, IoError, TorshError

pytestmark = [pytest.mark.needs_command("openssl"), pytest.mark.ranks]  # servers


@pytest.fixture
def tls(tmp_path: Path) -> JobTls:
    return make_certificate(tmp_path)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends on loopback, but as if they were on two machines."""
    for module in ("comm.store.tcp.store_loop", "comm.store.tcp.tcp_client"):
        monkeypatch.setattr(f"torsh_distributed.{module}.is_same_machine", lambda _: False)


def test_a_certificate_is_made_for_this_user_alone(tls: JobTls) -> None:
    assert tls.key.stat().st_mode & 0o077 == 0
    assert len(tls.own_digest()) == 32
    assert find_tls(tls.variables()) == tls
    assert find_tls({}) is None
    with pytest.raises(ConfigurationError, match="belong together"):
        find_tls({"TORSH_TLS_CERT": "x"})


def test_what_cannot_be_used_is_named(tls: JobTls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    junk = tmp_path / "junk"
    junk.write_text("junk")
    with pytest.raises(IoError, match="cannot be used"):
        JobTls(certificate=junk, key=tls.key).server_context()
    with pytest.raises(IoError, match="cannot be used"):
        JobTls(certificate=junk, key=tls.key).own_digest()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FeatureNotAvailable, match="--tls-cert"):
        make_certificate(tmp_path)


@pytest.mark.usefixtures("apart")
def test_a_store_under_tls(tls: JobTls) -> None:
    with TcpStoreServer(token="s", tls=tls) as server:
        client = TcpKeyspace(("127.0.0.1", server.port), timeout_s=10, token="s", tls=tls)
        large = bytes(range(256)) * 2**14
        client.set("a", large, None)
        client.set("b", b"", None)
        assert client.get(["a", "b", "c"]) == [large, b"", None]
        waiting = threading.Thread(target=client.wait, args=(["late"], 10.0))
        waiting.start()
        client.set("late", b"x", None)
        waiting.join(10)
        assert not waiting.is_alive()
        assert client.wait(["never"], 0.05) == ["never"]
        client.close()
        with pytest.raises(InvalidArgument, match="different token"):
            TcpKeyspace(("127.0.0.1", server.port), timeout_s=3, token="other", tls=tls)
        with pytest.raises(TorshError):
            TcpKeyspace(("127.0.0.1", server.port), timeout_s=1, token="s")
    with TcpStoreServer(token="s") as plain, pytest.raises(TorshError):
        TcpKeyspace(("127.0.0.1", plain.port), timeout_s=1, token="s", tls=tls)


def test_on_one_machine_nothing_is_encrypted(tls: JobTls, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in tls.variables().items():
        monkeypatch.setenv(name, value)
    with TcpStoreServer(token="s", tls=tls) as server, open_store(server.url, token="s") as store:
        store.set("a", b"1")
        assert store.get("a") == b"1"
    assert is_loopback_address("127.0.0.1")


@pytest.mark.usefixtures("apart")
def test_whoever_sits_in_between_is_found_out(tls: JobTls, tmp_path: Path) -> None:
    """He ends TLS with a certificate of his own and passes everything on: the proof does not fit his certificate."""
    (tmp_path / "his").mkdir()
    his = make_certificate(tmp_path / "his")
    with (
        TcpStoreServer(token="s", tls=tls) as server,
        in_between(his, server.port) as port,
        pytest.raises(InvalidArgument, match="different token"),
    ):
        TcpKeyspace(("127.0.0.1", port), timeout_s=5, token="s", tls=tls)


@contextlib.contextmanager
def in_between(his: JobTls, port: int) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = threading.Thread(target=_relay, args=(listener, his, port))
        relay.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        relay.join()


def _relay(listener: socket.socket, his: JobTls, port: int) -> None:
    with contextlib.suppress(OSError):
        while True:
            victim, _ = listener.accept()
            victim.settimeout(5)
            with (
                contextlib.suppress(OSError),
                his.server_context().wrap_socket(victim, server_side=True) as left,
                his.client_context().wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=5)) as right,
            ):
                right.sendall(left.recv(65536))
                left.sendall(right.recv(65536))
                right.sendall(left.recv(65536))


@pytest.mark.usefixtures("apart")
def test_an_authority_is_asked_too(tls: JobTls, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = make_certificate(tmp_path / "other")
    signed = JobTls(certificate=tls.certificate, key=tls.key, authority=tls.certificate)
    with TcpStoreServer(token="s", tls=signed) as server:
        client = TcpKeyspace(("127.0.0.1", server.port), timeout_s=10, token="s", tls=signed)
        client.set("a", b"1", None)
        client.close()
        stranger = JobTls(certificate=other.certificate, key=other.key, authority=tls.certificate)
        with pytest.raises(TorshError):
            TcpKeyspace(("127.0.0.1", server.port), timeout_s=1, token="s", tls=stranger)


def test_the_proof_is_bound_to_one_certificate(tls: JobTls) -> None:
    assert bound_secret(b"s", tls.own_digest()) != bound_secret(b"s", bytes(32))
    assert tls.client_context().minimum_version is ssl.TLSVersion.TLSv1_3


def test_a_connection_that_was_reset_before_it_was_taken_ends_nothing(tls: JobTls) -> None:
    """A stranger connects, speaks and resets at once; the server that takes the connection afterwards goes on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            stranger = socket.create_connection(listener.getsockname())
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.sendall(words)
            stranger.close()
            sock, _ = listener.accept()
            channel = TlsChannel(sock, tls.server_context(), is_server=True)
            assert channel.fileno() == sock.fileno() >= 0
            with pytest.raises(OSError):  # noqa: PT011 - the system's words differ
                channel.recv(65536)
            channel.close()
