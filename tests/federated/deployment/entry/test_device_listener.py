"""Strangers at a server's port: they keep no device out, take no memory, and do not make it deaf."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.federated.deployment.test_devices import DeviceTask, client, running, serving, when_all_are_there
from torsh_distributed.federated import FederatedConfig, LocalPrivacy, RoundServer
from torsh_distributed.federated.deployment.identity.device_identity import client_context
from torsh_distributed.federated.rounds.round_loop import RoundLoop

pytestmark = [pytest.mark.ranks, pytest.mark.needs_library("cryptography")]

ONE = FederatedConfig(rounds=1, clients_per_round=1)


def one_round(server: RoundServer, tmp_path: Path) -> None:
    with running(client(server, tmp_path, "d-0", token=server.new_token())) as results:
        when_all_are_there(server, 1)
        RoundLoop(DeviceTask(), ONE, server).run()
        server.close(is_done=True)
    assert results == [1]


def test_silent_strangers_keep_no_device_out(tmp_path: Path) -> None:
    with serving(tmp_path / "server", ONE) as server, contextlib.ExitStack() as stack:
        for _ in range(150):
            stack.enter_context(socket.create_connection(server.address))
        one_round(server, tmp_path)


def test_who_has_not_joined_may_send_no_payload(tmp_path: Path) -> None:
    with serving(tmp_path / "server", ONE) as server:
        with (
            socket.create_connection(server.address, timeout=10) as plain,
            client_context().wrap_socket(plain) as stranger,
        ):
            num_head, num_payload = struct.unpack("!IQ", stranger.recv(12))
            assert len(stranger.recv(num_head)) == num_head
            assert not num_payload
            stranger.sendall(struct.pack("!IQ", 1, 1 << 10) + b"\x00")
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "hung up before the payload came"
        one_round(server, tmp_path)


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_without_files_accepts_again_when_there_are_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path / "server", ONE) as server, socket.socket() as stranger:
        with caplog.at_level(logging.WARNING), no_more_files():
            stranger.connect(server.address)  # takes the descriptor that the waiting accept has
            with server._listener._changed:
                assert server._listener._changed.wait_for(lambda: "no more files" in caplog.text, 10)
        one_round(server, tmp_path)


@pytest.mark.needs_dp_accounting
def test_a_device_counts_its_own_budget_whatever_the_server_asks(tmp_path: Path) -> None:
    privacy = LocalPrivacy(clip_norm=1.0, noise_multiplier=5.0, delta=1e-3)
    greedy = dataclasses.replace(ONE, rounds=50, max_attempts=1, privacy=privacy)
    task = DeviceTask()
    task.config = dataclasses.replace(greedy, privacy=dataclasses.replace(privacy, budget=privacy.epsilon(3)))
    for begins in (True, False):  # what is spent stays spent in the next process
        with serving(tmp_path / "server", greedy) as server:
            token = server.new_token() if begins else None
            with running(client(server, tmp_path, "d-0", task=task, token=token)) as results:
                loop = RoundLoop(DeviceTask(), greedy, server)
                with pytest.raises(ConnectionError, match="this device has spent its budget"):
                    loop.run()
                server.close(is_done=True)
        assert results == [3 if begins else 0]
