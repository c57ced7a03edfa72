"""Calls that leave the node: by port, signed, or under TLS; what somebody on the way sees and cannot change."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from tests.rpc import exposed_functions as there
from tests.rpc.conftest import MakeWorker
from torsh_distributed.comm.transport import proof
from torsh_distributed.comm.trust.job_tls import make_certificate
from torsh_distributed.errors import CommunicationError, OperationTimeout
from torsh_distributed.rpc.directory import WorkerInfo

SENTENCE = "nobody on the way may read this sentence"


class Wire:
    """Passes connections on to a port, keeps what it has seen, and may change a byte."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.seen = bytearray()
        self.changes_bytes = False
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            for one, other in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._pass_on, args=(one, other)))
                self._threads[-1].start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := bytearray(one.recv(1 << 16)):
                self.seen += data
                if self.changes_bytes and len(data) > 100:
                    data[len(data) // 2] ^= 1
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the test has ended

    def close(self) -> None:
        for sock in [self._listening, *self._sockets]:
            with suppress(OSError):  # its other end was first
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()


@contextmanager
def apart(monkeypatch: pytest.MonkeyPatch, make_worker: MakeWorker) -> Iterator[Wire]:
    """A worker named `far` that is reached through a wire, as one of another node."""
    monkeypatch.setattr(proof, "is_same_machine", lambda sock: sock.family == socket.AF_UNIX)
    far = make_worker("far", host="127.0.0.1")
    assert far.info.tcp_address is not None
    wire = Wire(far.info.tcp_address)
    monkeypatch.setattr(WorkerInfo, "address", property(lambda info: wire.address))
    try:
        yield wire
    finally:
        wire.close()


@pytest.mark.parametrize("has_tls", [False, pytest.param(True, marks=pytest.mark.needs_command("openssl"))])
def test_calls_and_tensors_arrive_and_only_tls_hides_them(
    monkeypatch: pytest.MonkeyPatch, make_worker: MakeWorker, tmp_path: Path, has_tls: bool
) -> None:
    if has_tls:
        for name, value in make_certificate(tmp_path).variables().items():
            monkeypatch.setenv(name, value)
    with apart(monkeypatch, make_worker) as wire:
        caller = make_worker("near")
        assert caller.call("far", there.echo, (SENTENCE,)) == SENTENCE
        sent = torch.arange(1 << 20)
        assert torch.equal(caller.call("far", there.echo_on_a_thread, (sent,)), sent)
        assert list(caller.stream("far", there.count_to, (40,))) == list(range(40))
        assert (SENTENCE.encode() in wire.seen) is not has_tls
        assert len(wire.seen) > 2 * sent.nbytes
        caller.close()


@pytest.mark.parametrize("has_tls", [False, pytest.param(True, marks=pytest.mark.needs_command("openssl"))])
def test_a_byte_that_was_changed_on_the_way_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, make_worker: MakeWorker, tmp_path: Path, has_tls: bool
) -> None:
    if has_tls:
        for name, value in make_certificate(tmp_path).variables().items():
            monkeypatch.setenv(name, value)
    with apart(monkeypatch, make_worker) as wire:
        caller = make_worker("near", timeout_s=5.0)
        assert caller.call("far", there.add, (1, 2)) == 3
        wire.changes_bytes = True
        with pytest.raises((CommunicationError, OperationTimeout)):
            caller.call("far", there.keep, ("x" * 1000,))
        assert there.kept == []
        wire.changes_bytes = False
        assert caller.call("far", there.add, (1, 2)) == 3
        caller.close()
