"""Secure aggregation with devices over TLS: the weights of virtual clients, though no update is ever seen."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.federated.deployment.test_devices import CONFIG, DeviceTask, client, running, serving, when_all_are_there
from tests.federated.small_task import SmallTask
from torsh_distributed.errors import CommunicationError, ConfigurationError, InvalidArgument
from torsh_distributed.federated import (
    AsyncBuffer,
    CentralPrivacy,
    DataSelection,
    DeviceClient,
    FederatedConfig,
    LocalPrivacy,
    Median,
    PoissonSelection,
    RoundServer,
    Scaffold,
    SecureAggregation,
    simulate,
)
from torsh_distributed.federated.deployment.device_heartbeat import DeviceHeartbeat
from torsh_distributed.federated.deployment.identity.known_peers import KnownPeers, peer_line, read_peers
from torsh_distributed.federated.model_vector import ModelVector
from torsh_distributed.federated.privacy.secure_sum.packed_words import packed_bytes, unpack_words
from torsh_distributed.federated.rounds.round_loop import RoundLoop

pytestmark = [pytest.mark.ranks, pytest.mark.needs_library("cryptography")]
SECURE = dataclasses.replace(CONFIG, secure_aggregation=SecureAggregation(value_range=2.0))


@pytest.mark.parametrize("most_samples", [1, 100])
def test_devices_have_the_weights_of_virtual_clients(tmp_path: Path, most_samples: int) -> None:
    """Bit by bit, for both add integers. Weighted by samples it is the plain mean, up to the grid."""
    secure = SecureAggregation(value_range=2.0, most_samples=most_samples)

    class Task(DeviceTask):
        config = dataclasses.replace(SECURE, secure_aggregation=secure)

    virtual, real = Task(), Task()
    simulate(virtual, num_clients=3)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path / "server", Task.config))
        devices = [client(server, tmp_path, f"d-{i}", token=server.new_token(), task=Task()) for i in range(3)]
        with running(*devices) as results:
            records = RoundLoop(real, Task.config, server, directory=tmp_path / "server").run().rounds
            server.close(is_done=True)
    assert [torch.equal(one, other) for one, other in zip(real.seen, virtual.seen, strict=True)] == [True] * 3
    assert results == [3, 3, 3]
    assert all(record.figures.keys() == {"norm"} for record in records), "no figure of a single client"
    if most_samples > 1:
        plain = SmallTask()
        simulate(plain, num_clients=3, config=CONFIG)
        torch.testing.assert_close(real.seen[0], plain.seen[0], rtol=0, atol=secure.grid)


class FiveTask(SmallTask):
    config = dataclasses.replace(SECURE, rounds=2, clients_per_round=5, min_clients=4)

    def device_data(self, device: str) -> Any:
        return self.partition(5)[int(device.rpartition("-")[2])]


THREE = dataclasses.replace(FiveTask.config, rounds=1, min_clients=3, max_attempts=1)


class LeavesWhileMasking(DeviceClient):
    """Hangs up in the first round, when it is asked for the step in `leaves_at`."""

    leaves_at = ""
    has_left = False

    def _answer(self, connection: DeviceHeartbeat, head: Any, payload: memoryview) -> int:
        if head[0] == self.leaves_at and not self.has_left:
            self.has_left = True
            raise ConnectionError("asleep")
        return super()._answer(connection, head, payload)


@pytest.mark.parametrize(("step", "num_updates"), [("roster", 4), ("sealed", 4), ("delivered", 5), ("agreements", 5)])
def test_a_device_that_leaves_at_any_step_misses_no_more_than_the_round(
    tmp_path: Path, step: str, num_updates: int
) -> None:
    kind = type("Leaves", (LeavesWhileMasking,), {"leaves_at": step})
    real = FiveTask()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path / "server", FiveTask.config))
        devices = [
            client(server, tmp_path, f"d-{i}", token=server.new_token(), task=FiveTask(), kind=kind if i == 2 else None)
            for i in range(5)
        ]
        with running(*devices):
            loop = RoundLoop(real, FiveTask.config, server, directory=None)
            when_all_are_there(server, 5)
            leaves = server._connected["d-2"]
            records = [loop.run_round()]
            with server._changed:  # the server has seen that it left, and it is back
                assert server._changed.wait_for(lambda: server._connected.get("d-2", leaves) is not leaves, 20)
            when_all_are_there(server, 5)
            records.append(loop.run_round())
            server.close(is_done=True)
    assert [record.num_updates for record in records] == [num_updates, 5]
    assert records[0].failures == ({"its connection ended": 1} if num_updates == 4 else {})
    if num_updates == 5:
        virtual = FiveTask()
        simulate(virtual, num_clients=5)
        assert [torch.equal(one, other) for one, other in zip(real.seen, virtual.seen, strict=True)] == [True, True]


def failures_of(place: Path, config: FederatedConfig, *tasks: SmallTask, **options: Any) -> str:
    """Why clients did not count in one round with a device for each task."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(place / "server", config))
        devices = [
            client(server, place, f"d-{i}", token=server.new_token(), task=task, **options)
            for i, task in enumerate(tasks)
        ]
        with running(*devices):
            when_all_are_there(server, len(tasks))
            try:
                record = RoundLoop(FiveTask(), config, server, directory=None).run_round()
            finally:
                server.close(is_done=True)
    assert sum(record.failures.values()) == len(tasks) - record.num_updates
    return "; ".join(record.failures)


def test_a_device_sends_no_update_by_itself_if_it_takes_part_in_secure_aggregation(tmp_path: Path) -> None:
    """A server without it gets nothing, and one with settings of its own neither."""

    class PlainTask(FiveTask):
        config = dataclasses.replace(THREE, secure_aggregation=None)

    found = failures_of(tmp_path / "plain", PlainTask.config, PlainTask(), PlainTask(), PlainTask(), FiveTask())
    assert "asks for this device's update by itself, and it takes part in secure aggregation only" in found
    other = dataclasses.replace(THREE, secure_aggregation=SecureAggregation(fewest=4), min_clients=4)
    with pytest.raises(CommunicationError, match="settings of secure aggregation are not those of this device"):
        failures_of(tmp_path / "other", other, *(FiveTask() for _ in range(4)))


def test_a_value_beyond_the_range_keeps_its_client_out_with_the_reason(tmp_path: Path) -> None:
    class LoudTask(FiveTask):
        def train(self, model: torch.nn.Module, data: object, epochs: int) -> dict[str, float]:
            with torch.no_grad():
                next(model.parameters())[0, 0] += 5.0
            return {}

    found = failures_of(tmp_path, THREE, FiveTask(), FiveTask(), FiveTask(), LoudTask())
    assert found == "InvalidArgument: the update has a value beyond secure_aggregation.value_range"


def test_a_device_that_is_not_on_the_list_stops_the_sum(tmp_path: Path) -> None:
    with pytest.raises(CommunicationError, match="is not a device that this one knows"):
        failures_of(tmp_path, THREE, FiveTask(), FiveTask(), FiveTask(), peers={"d-0": bytes(32)})


def test_two_devices_get_no_sum(tmp_path: Path) -> None:
    with serving(tmp_path / "server", THREE) as server:
        devices = [client(server, tmp_path, f"d-{i}", token=server.new_token(), task=FiveTask()) for i in range(2)]
        with running(*devices):
            when_all_are_there(server, 2)
            loop = RoundLoop(FiveTask(), THREE, server, directory=None)
            replies = server.train(loop._order(0), ["d-0", "d-1"])
            server.close(is_done=True)
    assert replies.num_updates == 0
    assert set(replies.failures.values()) == {"only 2 clients have sent keys, and the sum needs 3"}


def test_what_the_server_gets_of_a_device_holds_no_update(tmp_path: Path) -> None:
    seen: list[tuple[str, bytes]] = []

    class Watched(RoundServer):
        def _take(self, device: Any, head: Any, payload: memoryview) -> None:
            seen.append((str(head[0]), bytes(payload)))
            super()._take(device, head, payload)

    replica = ModelVector(FiveTask().model())
    server = Watched(
        THREE, directory=tmp_path / "server", fingerprint=replica.fingerprint, numel=replica.numel, deadline_s=20.0
    )
    with contextlib.closing(server):
        devices = [client(server, tmp_path, f"d-{i}", token=server.new_token(), task=FiveTask()) for i in range(3)]
        with running(*devices):
            when_all_are_there(server, 3)
            RoundLoop(FiveTask(), THREE, server, directory=None).run_round()
            server.close(is_done=True)
    assert [kind for kind, _ in seen] == ["sum"] * 15, "five answers of each device, none of them an update"
    uploads = [payload for _, payload in seen if len(payload) == packed_bytes(replica.numel + 1, 18)]
    assert len(uploads) == 3
    # An update is small beside the range, so its words would be near 0 or near 2**18; masked ones are everywhere.
    for upload in uploads:
        words = unpack_words(upload, replica.numel + 1, 18).astype(np.int64)
        assert 0.2 < float(((words > 2**16) & (words < 3 * 2**16)).mean()) < 0.8


def test_peers_are_those_of_the_list_or_those_first_seen(tmp_path: Path) -> None:
    one, two = bytes(32), bytes(range(32))
    seen = KnownPeers(tmp_path, None)
    assert seen.unknown({"d-1": one}) == []
    assert seen.unknown({"d-1": two, "d-2": two}) == ["d-1"]
    assert KnownPeers(tmp_path, None).unknown({"d-1": one, "d-2": one}) == []
    assert KnownPeers(tmp_path, None).unknown({"d-2": two}) == ["d-2"]
    path = tmp_path / "peers.txt"
    path.write_text(f"{peer_line('d-1', two)}\n\n{peer_line('my phone', one)}\n")
    listed = KnownPeers(tmp_path, read_peers(path))
    assert listed.unknown({"d-1": two, "my phone": one}) == []
    assert listed.unknown({"d-1": two, "d-3": one}) == ["d-3"]
    path.write_text("d-1 abc")
    with pytest.raises(InvalidArgument, match="is not a name and a key"):
        read_peers(path)


def test_local_privacy_goes_with_secure_aggregation(tmp_path: Path) -> None:
    """The noise is there, within the range; a server that leaves it out is refused."""

    class NoisyTask(FiveTask):
        config = dataclasses.replace(
            THREE,
            privacy=LocalPrivacy(clip_norm=0.5, noise_multiplier=1.0, delta=1e-3),
            secure_aggregation=SecureAggregation(value_range=8.5),
        )

    with serving(tmp_path / "server", NoisyTask.config) as server:
        devices = [client(server, tmp_path, f"d-{i}", token=server.new_token(), task=NoisyTask()) for i in range(3)]
        with running(*devices):
            when_all_are_there(server, 3)
            order = RoundLoop(NoisyTask(), NoisyTask.config, server, directory=None)._order(0)
            replies = server.train(order, ["d-0", "d-1", "d-2"])
            quiet = server.train(dataclasses.replace(order, local_noise_std=0.0), ["d-0", "d-1", "d-2"])
            server.close(is_done=True)
    assert replies.num_updates == 3
    noise = replies.total.mean(order.model.dtype).delta
    assert 0.35 < float(noise.std()) < 0.85, "three clients' noise of 1, divided by three"
    assert quiet.num_updates == 0
    assert all("without the noise that this device adds" in reason for reason in quiet.failures.values())


def test_what_does_not_go_with_secure_aggregation_is_refused() -> None:
    base: dict[str, Any] = {"secure_aggregation": SecureAggregation(), "min_clients": 3}
    for changes, reason in (
        ({"rule": Median(hostile=1)}, "a robust rule looks at single updates"),
        ({"strategy": Scaffold()}, "scaffold averages more than updates"),
        ({"max_update_norm": 1.0}, "max_update_norm is the length of single updates"),
        ({"buffer": AsyncBuffer(size=3)}, "a buffer weights single updates"),
        ({"selection": DataSelection()}, "goes by what single clients report"),
        (
            {
                "selection": PoissonSelection(0.5),
                "privacy": CentralPrivacy(clip_norm=1.0, noise_multiplier=1.0, delta=1e-3),
            },
            "central privacy clips and counts single updates",
        ),
        ({"min_clients": 2}, "min_clients must be at least secure_aggregation.fewest"),
        ({"clients_per_round": 70_000}, "needs 33 bits"),
        ({"privacy": LocalPrivacy(clip_norm=1.0, noise_multiplier=1.0, delta=1e-3)}, "values go up to 17"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            FederatedConfig(**{**base, **changes})
