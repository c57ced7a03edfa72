"""Snapshots are given to ranks that have the secret, and to nobody else."""

from __future__ import annotations

import pytest
import torch

from torsh_distributed.checkpoint.replicas.snapshot_memory import Snapshot, SnapshotShelf
from torsh_distributed.checkpoint.replicas.snapshot_server import SnapshotServer, connect_to_server


def test_who_lacks_the_secret_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    shelf = SnapshotShelf()
    shelf.put(Snapshot(0, 1, torch.arange(10, dtype=torch.uint8), b"facts"))
    server = SnapshotServer("127.0.0.1", b"secret", shelf)
    with pytest.raises(OSError, match=r"secret|closed"):
        connect_to_server(server.address, b"another")
    member = connect_to_server(server.address, b"secret")
    member.send({"kind": "read", "rank": 0, "step": 1, "start": 3, "length": 4})
    assert bytes(member.receive()[1]) == bytes([3, 4, 5, 6])
    member.send({"kind": "read", "rank": 0, "step": 2, "start": 0, "length": 4})
    assert member.receive()[0] == {"error": "step 2 of rank 0 is not here"}
    member.close()
    server.close()
