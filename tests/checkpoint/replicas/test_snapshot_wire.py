"""Connections between ranks: only with the secret, and nothing damaged is taken."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch

from torsh_distributed.checkpoint.replicas import snapshot_wire
from torsh_distributed.checkpoint.replicas.snapshot_server import SnapshotServer
from torsh_distributed.checkpoint.replicas.snapshot_shelf import Snapshot, SnapshotShelf
from torsh_distributed.checkpoint.replicas.snapshot_wire import SnapshotConnection


def pair(monkeypatch: pytest.MonkeyPatch, *, is_same: bool) -> tuple[SnapshotConnection, SnapshotConnection]:
    monkeypatch.setattr(snapshot_wire, "is_same_machine", lambda sock: is_same)
    listener = socket.create_server(("127.0.0.1", 0))
    found: list[SnapshotConnection] = []

    def let_in() -> None:
        found.append(SnapshotConnection.accept(listener.accept()[0], b"secret"))

    thread = threading.Thread(target=let_in)
    thread.start()
    client = SnapshotConnection.connect(listener.getsockname(), b"secret")
    thread.join()
    listener.close()
    return client, found[0]


@pytest.mark.parametrize("is_same", [True, False])
def test_a_message_arrives_and_a_damaged_one_is_refused(monkeypatch: pytest.MonkeyPatch, is_same: bool) -> None:
    client, server = pair(monkeypatch, is_same=is_same)
    client.send({"kind": "x"}, b"payload")
    header, payload = server.receive()
    assert (header, bytes(payload)) == ({"kind": "x"}, b"payload")
    sendall: Any = client._sock.sendall
    sock = client._sock

    class Flipping:
        def sendall(self, data: Any) -> None:
            sendall(b"paxload" if bytes(data) == b"payload" else data)

        def __getattr__(self, name: str) -> Any:
            return getattr(sock, name)

    client._sock = Flipping()  # type: ignore[assignment]
    client.send({"kind": "x"}, b"payload")
    with pytest.raises(ConnectionAbortedError, match="arrived damaged"):
        server.receive()
    client.close()
    server.close()


def test_who_lacks_the_secret_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    shelf = SnapshotShelf()
    shelf.put(Snapshot(0, 1, torch.arange(10, dtype=torch.uint8), b"facts"))
    server = SnapshotServer("127.0.0.1", b"secret", shelf)
    with pytest.raises(OSError, match=r"secret|closed"):
        SnapshotConnection.connect(server.address, b"another")
    member = SnapshotConnection.connect(server.address, b"secret")
    member.send({"kind": "read", "rank": 0, "step": 1, "start": 3, "length": 4})
    assert bytes(member.receive()[1]) == bytes([3, 4, 5, 6])
    member.send({"kind": "read", "rank": 0, "step": 2, "start": 0, "length": 4})
    assert member.receive()[0] == {"error": "step 2 of rank 0 is not here"}
    member.close()
    server.close()
