"""Devices over TLS: the weights of a plain loop, and nobody gets in who should not. Real sockets on loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.federated.small_task import Points, SmallTask
from torsh_distributed.errors import CommunicationError, ConfigurationError, InvalidArgument
from torsh_distributed.federated import (
    CentralPrivacy,
    DeviceClient,
    FederatedConfig,
    FederatedStrategy,
    FedNova,
    PoissonSelection,
    RoundServer,
    Scaffold,
    simulate,
)
from torsh_distributed.federated.deployment.device_heartbeat import DeviceHeartbeat
from torsh_distributed.federated.deployment.device_messages import update_message
from torsh_distributed.federated.deployment.identity.device_identity import DeviceKey, EnrolmentToken
from torsh_distributed.federated.model_vector import ModelVector
from torsh_distributed.federated.rounds.round_loop import RoundLoop

pytestmark = [pytest.mark.ranks, pytest.mark.needs_library("cryptography")]


class DeviceTask(SmallTask):
    """Device `d-2` has the data of virtual client 2."""

    def device_data(self, device: str) -> Points:
        return self.partition(3)[int(device.rpartition("-")[2]) % 3]


CONFIG = FederatedConfig(rounds=3, clients_per_round=3, min_clients=3, local_epochs=2)


@contextlib.contextmanager
def serving(directory: Path, config: FederatedConfig = CONFIG, port: int = 0) -> Iterator[RoundServer]:
    replica = ModelVector(DeviceTask().model())
    server = RoundServer(
        config, directory=directory, fingerprint=replica.fingerprint, numel=replica.numel, port=port, deadline_s=20.0
    )
    try:
        yield server
    finally:
        server.close(is_done=True)


def when_all_are_there(server: RoundServer, count: int) -> None:
    with server._changed:
        assert server._changed.wait_for(lambda: len(server._connected) >= count, 20)


def client(server: RoundServer, place: Path, name: str, **options: Any) -> DeviceClient:
    kind = options.pop("kind", None) or DeviceClient
    task = options.pop("task", DeviceTask())
    return kind(task, server.address, name=name, directory=place / name, give_up_s=5.0, **options)


@contextlib.contextmanager
def running(*clients: DeviceClient) -> Iterator[list[Any]]:
    """Each on a thread; yields what they came to, once they have ended."""
    results: list[Any] = [None] * len(clients)

    def run(index: int) -> None:
        try:
            results[index] = clients[index].run()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(clients))]
    for thread in threads:
        thread.start()
    try:
        yield results
    finally:
        for thread in threads:
            thread.join(8)


def test_devices_have_the_weights_of_virtual_clients(tmp_path: Path) -> None:
    virtual, real = DeviceTask(), DeviceTask()
    simulate(virtual, num_clients=3, config=CONFIG)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path / "server"))
        devices = [client(server, tmp_path, f"d-{i}", token=server.new_token()) for i in range(3)]
        with running(*devices) as results:
            records = RoundLoop(real, CONFIG, server, directory=tmp_path / "server").run().rounds
            server.close(is_done=True)
    torch.testing.assert_close(real.seen, virtual.seen, rtol=0, atol=1e-6)
    assert results == [3, 3, 3]
    assert records[0].bytes_up > 3 * 4 * ModelVector(real.model()).numel


@pytest.mark.parametrize("strategy", [FedNova(), Scaffold()], ids=lambda one: one.name)
def test_strategies_with_more_than_a_mean_go_on_after_both_ends_were_restarted(
    tmp_path: Path, strategy: FederatedStrategy
) -> None:
    """Three rounds, a retry, other processes, two more rounds: the weights are those of virtual clients."""
    config = dataclasses.replace(CONFIG, rounds=5, strategy=strategy)
    virtual, real = DeviceTask(), DeviceTask()
    simulate(virtual, num_clients=3, config=config)
    for rounds in (3, 5):
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(serving(tmp_path / "server", config))
            token = server.new_token if rounds == 3 else lambda: None
            devices = [client(server, tmp_path, f"d-{i}", token=token()) for i in range(3)]
            with running(*devices):
                loop = RoundLoop(
                    real, dataclasses.replace(config, rounds=rounds), server, directory=tmp_path / "server"
                )
                if rounds == 5:  # an attempt whose updates do not count
                    server.train(loop._order(0), ["d-0", "d-1"])
                loop.run()
                server.close(is_done=True)
    torch.testing.assert_close(real.seen, virtual.seen, rtol=0, atol=1e-6)


def test_a_device_that_lost_its_memory_does_not_go_on_with_another(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, rounds=2, strategy=Scaffold(), min_clients=2)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path / "server", config))
        devices = [client(server, tmp_path, f"d-{i}", token=server.new_token()) for i in range(3)]
        with running(*devices):
            loop = RoundLoop(DeviceTask(), config, server, directory=None)
            when_all_are_there(server, 3)
            assert not loop.run_round().failures
            (tmp_path / "d-1" / "client.state").unlink()
            record = loop.run_round()
            server.close(is_done=True)
    (reason,) = record.failures
    assert "does not have what it remembered" in reason


@pytest.mark.needs_dp_accounting
def test_central_privacy_divides_by_all_devices_whoever_is_connected(tmp_path: Path) -> None:
    """Four are enrolled and two connected; the noise of a round is that of the expected two."""

    class StillTask(DeviceTask):
        def model(self) -> nn.Module:
            return nn.Linear(300, 100)

        def train(self, model: nn.Module, data: object, epochs: int) -> dict[str, float]:
            return {}

    privacy = CentralPrivacy(clip_norm=0.5, noise_multiplier=2.0, delta=1e-3)
    config = FederatedConfig(rounds=2, selection=PoissonSelection(0.5), privacy=privacy)
    task = StillTask()
    replica = ModelVector(task.model())
    server = RoundServer(
        config, directory=tmp_path / "server", fingerprint=replica.fingerprint, numel=replica.numel, deadline_s=20.0
    )
    with contextlib.closing(server):
        for index in range(2):
            server.devices.enrol(f"away-{index}", bytes(32), server.devices.add_token())
        devices = [client(server, tmp_path, f"d-{i}", token=server.new_token(), task=task) for i in range(2)]
        with running(*devices):
            result = RoundLoop(task, config, server, directory=None).run()
            server.close(is_done=True)
    assert abs(float((task.seen[1] - task.seen[0]).std()) - 0.5 * 2.0 / 2) < 0.02
    assert result.rounds[-1].epsilon is not None
    assert abs(result.rounds[-1].epsilon - privacy.epsilon(2, 0.5)) < 1e-6


def test_a_server_that_went_away_goes_on_with_the_next_round(tmp_path: Path) -> None:
    virtual, real = DeviceTask(), DeviceTask()
    simulate(virtual, num_clients=3, config=CONFIG)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(serving(tmp_path / "server"))
        devices = [client(first, tmp_path, f"d-{i}", token=first.new_token()) for i in range(3)]
        stack.enter_context(running(*devices))
        RoundLoop(real, CONFIG, first, directory=tmp_path / "server").run_round()
        first.close()
        second = stack.enter_context(serving(tmp_path / "server", port=first.address[1]))
        result = RoundLoop(real, CONFIG, second, directory=tmp_path / "server").run()
        second.close(is_done=True)
    assert [record.round for record in result.rounds] == [0, 1, 2]
    torch.testing.assert_close(real.seen, virtual.seen, rtol=0, atol=1e-6)


def test_nobody_gets_in_who_should_not(tmp_path: Path) -> None:
    class WiderTask(DeviceTask):
        def model(self) -> nn.Module:
            return nn.Linear(5, 3)

    with serving(tmp_path / "server", FederatedConfig(clients_per_round=1)) as server:
        token = server.new_token()
        with running(client(server, tmp_path, "d-0", token=token)) as first:
            assert [facts.client for facts in server.clients()] == ["d-0"]
            stolen = server.new_token()
            for message, make in {
                "the token was used before": lambda: client(server, tmp_path, "d-1", token=token),
                "another device is enrolled as 'd-0'": lambda: client(server, tmp_path / "x", "d-0", token=stolen),
                "'d-0' is enrolled with another key": lambda: known(server, tmp_path / "y", "d-0"),
                "'d-9' is not enrolled": lambda: known(server, tmp_path / "z", "d-9"),
                "another model": lambda: client(server, tmp_path, "d-2", token=stolen, task=WiderTask()),
                "it shows another certificate": lambda: client(
                    server, tmp_path, "d-1", token=EnrolmentToken(b"x" * 16, b"y" * 32).text()
                ),
            }.items():
                with pytest.raises(ConfigurationError, match=message):
                    make().run()
            server.revoke("d-0")
    assert isinstance(first[0], ConfigurationError)
    assert "'d-0' was revoked" in str(first[0])
    with serving(tmp_path / "server") as again, pytest.raises(ConfigurationError, match="revoked"):
        client(again, tmp_path, "d-0").run()


def known(server: RoundServer, place: Path, name: str) -> DeviceClient:
    """A device with a key of its own that says it was enrolled before."""
    (place / name).mkdir(parents=True)
    (place / name / "server.digest").write_bytes(server.digest)
    return client(server, place, name)


class OddClient(DeviceClient):
    """Answers as `tamper` says."""

    tamper: Callable[[OddClient, DeviceHeartbeat, bytes, memoryview], int]

    def _answer(self, connection: DeviceHeartbeat, head: Any, payload: memoryview) -> int:
        return type(self).tamper(self, connection, head[1], payload)


def as_another(self: OddClient, connection: DeviceHeartbeat, nonce: bytes, payload: memoryview) -> int:
    packed = b"anything"
    other = DeviceKey.load_or_make(self._server_file.parent / "other.key")
    connection.send(["update", nonce, other.sign(update_message(nonce, packed))], packed)
    return 0


def garbage(self: OddClient, connection: DeviceHeartbeat, nonce: bytes, payload: memoryview) -> int:
    packed = b"\xff" * 40
    connection.send(["update", nonce, self._key.sign(update_message(nonce, packed))], packed)
    return 0


class Recorded:
    """What a device sent, to be sent again."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def send(self, head: Any, payload: bytes) -> None:
        self.parts = [head, payload]

    def beating(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def replayed(self: OddClient, connection: DeviceHeartbeat, nonce: bytes, payload: memoryview) -> int:
    """The reply of the first round, once more in each later one, before the right one."""
    recorded = Recorded()
    DeviceClient._answer(self, recorded, ["work", nonce, b""], payload)  # type: ignore[arg-type]
    first = self.__dict__.setdefault("first", recorded.parts)
    connection.send(*first)
    if first is not recorded.parts:
        connection.send(*recorded.parts)
    return 1


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (as_another, "its update is not signed by it"),
        (garbage, "the bytes are not a message of this version: it was not made by serialize"),
        (replayed, None),
    ],
)
def test_odd_replies_are_refused_singly(tmp_path: Path, tamper: Any, reason: str | None) -> None:
    config = FederatedConfig(rounds=2, clients_per_round=3, min_clients=2, local_epochs=2)
    kind = type("Tampering", (OddClient,), {"tamper": tamper})
    task = DeviceTask()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path / "server", CONFIG))
        devices = [client(server, tmp_path, f"d-{i}", token=server.new_token()) for i in range(2)]
        odd = client(server, tmp_path, "d-2", token=server.new_token(), kind=kind)
        with running(*devices, odd):
            records = RoundLoop(task, config, server, directory=None).run().rounds
            server.close(is_done=True)
    if reason is None:
        assert [record.num_updates for record in records] == [3, 3], (
            "a replayed reply does not count, the right one does"
        )
        virtual = DeviceTask()
        simulate(virtual, num_clients=3, config=config)
        torch.testing.assert_close(task.seen, virtual.seen, rtol=0, atol=1e-6)
    else:
        assert [record.failures for record in records] == [{reason: 1}] * 2


def test_strangers_and_sleepers_hold_up_nobody(tmp_path: Path) -> None:
    with serving(tmp_path / "server", FederatedConfig(clients_per_round=1)) as server:
        plain = socket.create_connection(server.address)
        plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        sleeper = context.wrap_socket(socket.create_connection(server.address))
        with running(client(server, tmp_path, "d-0", token=server.new_token())) as results:
            config = FederatedConfig(rounds=1, clients_per_round=1)
            RoundLoop(DeviceTask(), config, server, directory=None).run()
            server.close(is_done=True)
        assert results == [1]
        plain.close()
        sleeper.close()


def test_what_cannot_work_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="not an enrolment token"):
        EnrolmentToken.parse("torsh-nonsense")
    with serving(tmp_path / "server") as server:
        with pytest.raises(InvalidArgument, match="is not enrolled"):
            client(server, tmp_path, "d-0")
        with pytest.raises(InvalidArgument, match="no device of this name"):
            server.revoke("d-7")
        gone = server.address
        token = server.new_token()
    device = DeviceClient(DeviceTask(), gone, name="d-0", directory=tmp_path / "late", token=token, give_up_s=0.1)
    with pytest.raises(CommunicationError, match="the server cannot be reached"):
        device.run()
