"""Tiers on devices: the weights of simulated tiers on the same data, each tier at its own period. Real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.federated.deployment.test_devices import running, serving, when_all_are_there
from tests.federated.small_task import Points, SmallTask
from torsh_distributed.cli.federated.commands import app
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.federated import (
    AsyncBuffer,
    DeviceClient,
    FederatedConfig,
    FedProx,
    Median,
    RoundServer,
    SecureAggregation,
    TieredTask,
    serve_tier,
    simulate,
)
from torsh_distributed.federated.deployment.identity.device_identity import EnrolmentToken
from torsh_distributed.federated.rounds.round_loop import RoundLoop

pytestmark = [pytest.mark.ranks, pytest.mark.needs_library("cryptography")]
CLOUD = FederatedConfig(rounds=2, clients_per_round=3, min_clients=3, local_epochs=2)
EDGE = FederatedConfig(clients_per_round=2, min_clients=2)
SECURE = FederatedConfig(
    clients_per_round=3, min_clients=3, secure_aggregation=SecureAggregation(value_range=2.0, most_samples=64)
)


class TierTask(SmallTask):
    """Device `d-4` has the data of virtual client 4 of those below three aggregators."""

    each = 2

    def device_data(self, device: str) -> Points:
        return self.partition(3 * self.each)[int(device.rpartition("-")[2])]


class WideTask(TierTask):
    each = 3


class Tier:
    """An aggregator on a thread, with devices of its own."""

    def __init__(
        self, number: int, place: Path, upstream: Any, config: FederatedConfig, period: int, each: int
    ) -> None:
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.rounds: list[int] = []
        self.outcome: Any = None
        task = WideTask() if each == 3 else TierTask()

        def run() -> None:
            try:
                self.outcome = serve_tier(
                    task,
                    upstream.address,
                    name=f"edge-{number}",
                    directory=place / f"edge-{number}",
                    period=period,
                    token=upstream.new_token(),
                    config=config,
                    num_tokens=each,
                    deadline_s=20.0,
                    give_up_s=5.0,
                    say=self.said.put,
                    on_round=lambda record: self.rounds.append(record.num_updates),
                )
            except Exception as error:
                self.outcome = error

        self.thread = threading.Thread(target=run)
        self.thread.start()
        host, _, port = self.said.get(timeout=20).removeprefix("serving ").rpartition(":")
        tokens = [self.said.get(timeout=20).removeprefix("token ") for _ in range(each)]
        assert EnrolmentToken.parse(tokens[0]).server_digest != upstream.digest
        self.devices = [
            DeviceClient(
                WideTask() if each == 3 else TierTask(),
                (host, int(port)),
                name=f"d-{each * number + index}",
                directory=place / f"d-{each * number + index}",
                token=token,
                give_up_s=5.0,
                secure_aggregation=config.secure_aggregation,
            )
            for index, token in enumerate(tokens)
        ]


@contextlib.contextmanager
def tiers(
    place: Path, upstream: RoundServer, periods: tuple[int, ...], config: FederatedConfig = EDGE, each: int = 2
) -> Iterator[list[Tier]]:
    edges = [Tier(number, place, upstream, config, period, each) for number, period in enumerate(periods)]
    with running(*[device for edge in edges for device in edge.devices]):
        yield edges
        for edge in edges:
            edge.thread.join(20)


def when_enrolled(devices: list[DeviceClient]) -> None:
    deadline_s = time.monotonic() + 20
    while any(one._token is not None for one in devices):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("period", [1, 3])
def test_tiers_of_devices_have_the_weights_of_simulated_tiers(tmp_path: Path, period: int) -> None:
    virtual, real = TierTask(), TierTask()
    simulate(TieredTask(virtual, clients=2, period=period), num_clients=3, config=CLOUD)
    with serving(tmp_path / "cloud", CLOUD) as cloud, tiers(tmp_path, cloud, (period,) * 3) as edges:
        records = RoundLoop(real, CLOUD, cloud).run().rounds
        cloud.close(is_done=True)
    torch.testing.assert_close(real.seen, virtual.seen, rtol=0, atol=1e-6)
    assert [edge.rounds for edge in edges] == [[2] * 2 * period] * 3
    assert [edge.outcome for edge in edges] == [2, 2, 2]
    assert records[0].figures["client_loss"] > 0


def test_a_rule_over_sums_that_are_secure_within_groups(tmp_path: Path) -> None:
    """Three groups of three devices; no server sees an update, and the cloud takes the median of the groups' sums."""
    cloud_config = dataclasses.replace(CLOUD, rule=Median(hostile=1))
    virtual, real = WideTask(), WideTask()
    simulate(TieredTask(virtual, clients=3), num_clients=3, config=cloud_config)
    with serving(tmp_path / "cloud", cloud_config) as cloud, tiers(tmp_path, cloud, (1,) * 3, SECURE, 3) as edges:
        RoundLoop(real, cloud_config, cloud).run()
        cloud.close(is_done=True)
    assert [edge.rounds for edge in edges] == [[3, 3]] * 3
    # The grid of a secure sum has 2**16 steps over +-2.
    torch.testing.assert_close(real.seen, virtual.seen, rtol=0, atol=2e-4)


def test_an_aggregator_whose_devices_are_away_fails_its_round_and_says_why(tmp_path: Path) -> None:
    config = dataclasses.replace(CLOUD, rounds=1, clients_per_round=2, min_clients=1)
    with serving(tmp_path / "cloud", config) as cloud, tiers(tmp_path, cloud, (1, 1)) as edges:
        when_all_are_there(cloud, 2)
        when_enrolled(edges[0].devices)  # else it would enrol with the other's key, and sign with it rightly
        edges[0].devices[1]._key = edges[0].devices[0]._key  # its updates are not signed by it
        record = RoundLoop(TierTask(), config, cloud).run_round()
        cloud.close(is_done=True)
    assert record.num_updates == 1
    (reason,) = record.failures
    assert "got 1 updates in 3 attempts, and needs 2" in reason


def test_what_does_not_reach_devices_below_a_tier_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(CLOUD, rounds=1, clients_per_round=1, min_clients=1, strategy=FedProx(mu=0.1))
    with serving(tmp_path / "cloud", config) as cloud, tiers(tmp_path, cloud, (1,)):
        with pytest.raises(Exception, match="took no step of an optimizer of torch"):
            RoundLoop(TierTask(), config, cloud).run_round()
        cloud.close(is_done=True)


def test_settings_of_a_tier_that_cannot_work(tmp_path: Path) -> None:
    buffered = FederatedConfig(buffer=AsyncBuffer(size=2))
    with pytest.raises(ConfigurationError, match="updates of a buffer did not"):
        serve_tier(TierTask(), ("127.0.0.1", 1), name="e", directory=tmp_path, config=buffered)
    with pytest.raises(InvalidArgument, match="at least one round"):
        serve_tier(TierTask(), ("127.0.0.1", 1), name="e", directory=tmp_path, period=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--upstream", "host:1"], "--upstream and --name go together"),
        (["--period", "3"], "--upstream and --name go together"),
        (["--upstream", "host:1", "--name", "e", "--rounds", "3"], "are for the tier above"),
    ],
)
def test_options_of_another_tier_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", "task.py", "--directory", str(tmp_path), *options])
    assert isinstance(result.exception, InvalidArgument)
    assert message in str(result.exception)
