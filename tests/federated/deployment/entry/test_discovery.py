"""Servers on the local network: found by mDNS, believed for their certificate. Real sockets on loopback."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.federated.deployment.test_devices import CONFIG, DeviceTask, running, serving
from torsh_distributed.cli.federated.commands import app
from torsh_distributed.errors import CommunicationError, FeatureNotAvailable, InvalidArgument
from torsh_distributed.federated import DeviceClient, simulate
from torsh_distributed.federated.deployment.entry.discovery import announced, find_server
from torsh_distributed.federated.rounds.round_loop import RoundLoop

pytestmark = [pytest.mark.ranks, pytest.mark.needs_library("cryptography"), pytest.mark.needs_library("zeroconf")]


@pytest.mark.slow
def test_devices_find_their_own_server_among_others_and_again_when_it_has_moved(tmp_path: Path) -> None:
    """A third server announces the digest of the first: it cannot show the certificate, and is passed over."""
    virtual, real = DeviceTask(), DeviceTask()
    simulate(virtual, num_clients=3, config=CONFIG)
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(serving(tmp_path / "other"))
        stack.enter_context(announced(other.address, other.digest))
        server = stack.enter_context(serving(tmp_path / "server"))
        stack.enter_context(announced(other.address, server.digest))
        devices = [
            DeviceClient(
                DeviceTask(), None, name=f"d-{i}", directory=tmp_path / f"d-{i}", token=server.new_token(), give_up_s=20
            )
            for i in range(3)
        ]
        stack.enter_context(running(*devices))
        with announced(server.address, server.digest):
            RoundLoop(real, CONFIG, server, directory=tmp_path / "server").run_round()
            server.close()
        moved = stack.enter_context(serving(tmp_path / "server"))
        assert moved.address != server.address
        with announced(moved.address, moved.digest):
            RoundLoop(real, CONFIG, moved, directory=tmp_path / "server").run()
            moved.close(is_done=True)
    torch.testing.assert_close(real.seen, virtual.seen, rtol=0, atol=1e-6)


def test_a_server_that_nobody_announces_is_not_found() -> None:
    with pytest.raises(CommunicationError, match="was not found on the local network"):
        find_server(b"x" * 32, 0.3)


def test_the_command_takes_an_address_or_looks_for_one(tmp_path: Path) -> None:
    options = ["--name", "d-0", "--directory", str(tmp_path)]
    for args in (["host:1"], ["--discover", "host:1", "task.py"]):
        result = CliRunner().invoke(app, ["join", *args, *options])
        assert isinstance(result.exception, InvalidArgument)
        assert "give HOST:PORT and a task, or --discover and a task" in str(result.exception)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(FeatureNotAvailable, match=r"torsh-distributed\[discovery\]"):
        find_server(b"x" * 32, 0.1)
