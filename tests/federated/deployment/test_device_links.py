"""What a device's link changes: its codec, its round's deadline, whether it is asked. Real sockets on loopback."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.federated.deployment.test_buffered_devices import GatedTask
from tests.federated.deployment.test_devices import CONFIG, DeviceTask, client, running, when_all_are_there
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.federated import (
    ClientFacts,
    FederatedConfig,
    LinkAdaptation,
    RoundServer,
    SecureAggregation,
    simulate,
)
from torsh_distributed.federated.deployment.device_links import network_is_metered
from torsh_distributed.federated.deployment.serve import open_server
from torsh_distributed.federated.rounds.round_loop import RoundLoop

pytestmark = [pytest.mark.ranks, pytest.mark.needs_library("cryptography")]
SLOW_BYTES_PER_S = 1e5  # 0.8 Mbit/s


def serve(
    place: Path, links: LinkAdaptation, config: FederatedConfig = CONFIG, deadline_s: float = 20.0
) -> RoundServer:
    return open_server(
        DeviceTask(),
        config,
        directory=place / "server",
        host="127.0.0.1",
        port=0,
        deadline_s=deadline_s,
        heartbeat=None,
        links=links,
    )


def measured(server: RoundServer, bytes_per_s: dict[str, float]) -> None:
    """What long uploads would have shown; those of these tests are short."""
    with server._changed:
        for name, rate in bytes_per_s.items():
            server._facts_of(name).bytes_per_s = rate


@pytest.mark.parametrize("num_slow", [1, 3])
def test_slow_devices_send_by_a_codec_and_others_whole(tmp_path: Path, num_slow: int) -> None:
    """With all devices slow the weights are those of a simulation with that codec."""
    virtual, real = DeviceTask(), DeviceTask()
    simulate(virtual, num_clients=3, config=dataclasses.replace(CONFIG, upload="int8"))
    with contextlib.closing(serve(tmp_path, LinkAdaptation(slow_mbps=1.0))) as server:
        devices = [client(server, tmp_path, str(i), token=server.new_token()) for i in range(3)]
        with running(*devices):
            measured(server, {"0": 1e9, **{str(i): SLOW_BYTES_PER_S for i in range(3 - num_slow, 3)}})
            records = RoundLoop(real, CONFIG, server).run().rounds
            server.close(is_done=True)
    assert [record.num_updates for record in records] == [3, 3, 3]
    is_near = torch.allclose(torch.stack(real.seen), torch.stack(virtual.seen), rtol=0, atol=1e-6)
    assert is_near == (num_slow == 3)
    whole = 4 * real.seen[0].numel()
    assert (records[0].bytes_up > 3 * whole) == (num_slow < 3)


def test_a_metered_device_is_not_asked_until_its_link_is_another(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, min_clients=2)
    is_metered = True
    with contextlib.closing(serve(tmp_path, LinkAdaptation(), config)) as server:
        devices = [client(server, tmp_path, f"d-{i}", token=server.new_token()) for i in range(2)]
        phone = client(server, tmp_path, "d-2", token=server.new_token(), is_metered=lambda: is_metered)
        with running(*devices, phone) as results:
            when_all_are_there(server, 3)
            loop = RoundLoop(DeviceTask(), config, server)
            assert loop.run_round().num_chosen == 2
            is_metered = False
            with server._changed:
                first = server._connected["d-2"]
            first.connection.cut()
            with server._changed:
                assert server._changed.wait_for(lambda: server._connected.get("d-2") not in (None, first), 20)
            assert loop.run_round().num_chosen == 3
            server.close(is_done=True)
    assert results == [2, 2, 1]


def test_a_round_does_not_wait_for_the_servers_deadline_when_its_devices_are_known(tmp_path: Path) -> None:
    """The deadline of the server is longer than a test may take."""
    config = dataclasses.replace(CONFIG, min_clients=2)
    held = GatedTask()
    links = LinkAdaptation(deadline_factor=4.0)
    with contextlib.closing(serve(tmp_path, links, config, deadline_s=1000.0)) as server:
        devices = [client(server, tmp_path, f"d-{i}", token=server.new_token()) for i in range(2)]
        last = client(server, tmp_path, "d-2", task=held, token=server.new_token())
        with running(*devices, last):
            when_all_are_there(server, 3)
            loop = RoundLoop(DeviceTask(), config, server)
            assert loop.run_round().num_updates == 3
            assert all(facts.turn_s is not None for facts in server.members())
            with server._changed:
                for facts in server._facts.values():
                    facts.turn_s = 0.5
            held.gate.clear()
            record = loop.run_round()
            held.gate.set()
            server.close(is_done=True)
    assert record.failures == {"it did not answer in time": 1}


def test_deadlines_follow_the_slowest_device_once_all_are_known() -> None:
    links = LinkAdaptation(deadline_factor=5.0)
    quick, slow, new = (
        ClientFacts(client=name, turn_s=turn_s) for name, turn_s in (("a", 1.0), ("b", 3.0), ("c", None))
    )
    assert links.deadline_s([quick], 600) == 5
    assert links.deadline_s([quick, slow], 600) == 15
    assert links.deadline_s([quick, slow], 10) == 10
    assert links.deadline_s([quick, new], 600) == 600
    assert LinkAdaptation(deadline_factor=None).deadline_s([quick], 600) == 600


@pytest.mark.parametrize(
    ("answer", "is_metered"), [("u 1", True), ("u 3", True), ("u 2", False), ("u 4", False), ("", False)]
)
def test_network_manager_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, is_metered: bool
) -> None:
    command = tmp_path / "busctl"
    command.write_text(f'#!/bin/sh\n[ "$5" = Metered ] || exit 1\necho "{answer}"\n')
    command.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert network_is_metered() is is_metered


def test_a_machine_without_it_is_not_metered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not network_is_metered()


def test_links_that_cannot_be_adapted_to_are_refused(tmp_path: Path) -> None:
    class DoubleTask(DeviceTask):
        def model(self) -> nn.Module:
            return nn.Linear(5, 3).double()

    with pytest.raises(ConfigurationError, match="codecs are for models of float32"):
        open_server(
            DoubleTask(),
            CONFIG,
            directory=tmp_path,
            host="127.0.0.1",
            port=0,
            deadline_s=1.0,
            heartbeat=None,
            links=LinkAdaptation(),
        )
    secure = dataclasses.replace(CONFIG, secure_aggregation=SecureAggregation())
    with pytest.raises(ConfigurationError, match="secure aggregation hides"):
        serve(tmp_path, LinkAdaptation(), secure)
    with pytest.raises(ConfigurationError, match="deadline_factor must be above 1"):
        LinkAdaptation(deadline_factor=0.5)
    with pytest.raises(ConfigurationError, match="powersgd"):
        LinkAdaptation(slow_upload="powersgd")
