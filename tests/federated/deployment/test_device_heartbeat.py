"""Devices that fall silent are given up, at any byte of a message; they come again and count again."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.federated.deployment.test_devices import DeviceTask, client, running, when_all_are_there
from torsh_distributed import events
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.federated import DeviceClient, FederatedConfig, HeartbeatSettings, RoundServer, simulate
from torsh_distributed.federated.deployment.device_heartbeat import DeviceHeartbeat
from torsh_distributed.federated.model_vector import ModelVector
from torsh_distributed.federated.rounds.round_loop import RoundLoop

pytestmark = [pytest.mark.ranks, pytest.mark.needs_library("cryptography")]
QUICK = HeartbeatSettings(beat_s=0.1, expire_s=1.5)


class LargeTask(DeviceTask):
    """An update of 160 KB: more than a record of TLS, and enough to measure a link by."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4500), nn.Tanh(), nn.Linear(4500, 3))


def serve(place: Path, config: FederatedConfig) -> RoundServer:
    replica = ModelVector(LargeTask().model())
    return RoundServer(
        config,
        directory=place / "server",
        fingerprint=replica.fingerprint,
        numel=replica.numel,
        deadline_s=20.0,
        heartbeat=QUICK,
    )


class SleepyClient(DeviceClient):
    """In its first round it falls asleep behind the first half of its update, and wakes up when it is told to."""

    wakes = threading.Event()

    def _send(self, heartbeat: DeviceHeartbeat, kind: str, nonce: bytes, payload: bytes) -> None:
        if self.wakes.is_set():
            return super()._send(heartbeat, kind, nonce, payload)
        connection = heartbeat._connection
        frame = connection._frames.seal(b"\x93\xa6update\xc4\x00\xc4\x00", [payload])
        connection._sock.sendall(frame[0])
        connection._sock.sendall(frame[1][: len(frame[1]) // 2])
        assert self.wakes.wait(20)
        raise ConnectionResetError("asleep")


def test_a_device_that_sleeps_in_mid_upload_misses_the_round_and_counts_in_the_next(tmp_path: Path) -> None:
    config = FederatedConfig(rounds=2, clients_per_round=3, min_clients=2, local_epochs=2)
    virtual, real = LargeTask(), LargeTask()
    simulate(virtual, num_clients=3, config=config)
    SleepyClient.wakes.clear()
    with contextlib.closing(serve(tmp_path, config)) as server:
        devices = [client(server, tmp_path, f"d-{i}", task=LargeTask(), token=server.new_token()) for i in range(2)]
        sleepy = client(server, tmp_path, "d-2", task=LargeTask(), token=server.new_token(), kind=SleepyClient)
        with running(*devices, sleepy) as results:
            loop = RoundLoop(real, config, server)
            when_all_are_there(server, 3)
            first = loop.run_round()
            assert first.failures == {"it was silent for 1.5 s": 1}
            assert [facts.client for facts in server.clients()] == ["d-0", "d-1"]
            SleepyClient.wakes.set()
            when_all_are_there(server, 3)
            told: list[events.FederatedRoundEvent] = []
            stop = events.subscribe(told.append, events.FederatedRoundEvent)
            second = loop.run_round()
            stop()
            assert (second.num_updates, second.failures) == (3, {})
            rates = {facts.client: facts.bytes_per_s for facts in server.members()}
            assert all((rate or 0) > 1e5 for rate in rates.values())
            assert [one.links for one in told] == [rates]
            server.close(is_done=True)
    assert results == [2, 2, 1]
    # The second round began with the model of a first one without client 2, so a plain simulation differs.
    assert not torch.allclose(real.seen[0], virtual.seen[0], atol=1e-6)


def test_devices_that_train_for_longer_than_they_may_be_silent_are_kept(tmp_path: Path) -> None:
    class SlowTask(LargeTask):
        def train(self, model: nn.Module, data: Any, epochs: int) -> Any:
            threading.Event().wait(1.5 * QUICK.expire_s)
            return super().train(model, data, epochs)

    config = FederatedConfig(rounds=1, clients_per_round=2, min_clients=2, local_epochs=2)
    with contextlib.closing(serve(tmp_path, config)) as server:
        devices = [client(server, tmp_path, f"d-{i}", task=SlowTask(), token=server.new_token()) for i in range(2)]
        with running(*devices) as results:
            record = RoundLoop(LargeTask(), config, server).run_round()
            when_all_are_there(server, 2)
            server.close(is_done=True)
    assert (record.num_updates, record.failures) == (2, {})
    assert results == [1, 1]


def test_a_device_finds_out_that_its_server_is_silent(tmp_path: Path) -> None:
    """A server that stops without a word, as a machine without power does: the device comes to it again."""
    config = FederatedConfig(rounds=1, clients_per_round=1)
    with contextlib.closing(serve(tmp_path, config)) as server:
        device = client(server, tmp_path, "d-0", task=LargeTask(), token=server.new_token())
        with running(device) as results:
            when_all_are_there(server, 1)
            first = server._connected["d-0"]
            with server._changed:  # its thread cannot go on to say that it is alive
                first.heartbeat._said_s = float("inf")
            with server._changed:
                assert server._changed.wait_for(lambda: server._connected.get("d-0") not in (None, first), 10), (
                    "it did not come again"
                )
            RoundLoop(LargeTask(), config, server).run()
            server.close(is_done=True)
    assert results == [1]


def test_an_end_needs_time_for_two_beats() -> None:
    with pytest.raises(ConfigurationError, match=r"two beats.*\n.*\n.*lower beat_s \(--heartbeat-s\) to 7.5"):
        HeartbeatSettings(beat_s=10, expire_s=15)
