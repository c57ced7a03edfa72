"""Devices in buffered rounds: nobody waits for a slow one, and what it sends late counts with its staleness."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.federated.deployment.test_devices import DeviceTask, client, running, serving
from tests.federated.small_task import Points
from tests.federated.strategies.test_equations import EPOCHS, first_model, locally_trained, values_of
from torsh_distributed.federated import AsyncBuffer, FederatedConfig, simulate
from torsh_distributed.federated.rounds.round_loop import RoundLoop

pytestmark = [pytest.mark.ranks, pytest.mark.needs_library("cryptography")]


class GatedTask(DeviceTask):
    """Its training may be held."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def train(self, model: nn.Module, data: Points, epochs: int) -> Mapping[str, float]:
        assert self.gate.wait(20)
        return super().train(model, data, epochs)


def test_a_late_device_counts_by_its_staleness(tmp_path: Path) -> None:
    size, devices = 2, [GatedTask() for _ in range(3)]
    config = FederatedConfig(
        rounds=4, clients_per_round=3, local_epochs=EPOCHS, min_clients=2, buffer=AsyncBuffer(size=size)
    )

    class ServerTask(DeviceTask):
        """After the third step device 2 may go on, and device 0 may not: the fourth step is of devices 1 and 2."""

        def evaluate(self, model: nn.Module) -> Mapping[str, float]:
            if len(self.seen) == 2:
                devices[0].gate.clear()
                devices[2].gate.set()
            return super().evaluate(model)

    task = ServerTask()
    devices[2].gate.clear()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path / "server", config))
        clients = [client(server, tmp_path, f"d-{i}", task=devices[i], token=server.new_token()) for i in range(3)]
        with running(*clients) as results:
            with server._changed:
                assert server._changed.wait_for(lambda: len(server._connected) == 3, 20)
            records = RoundLoop(task, config, server).run().rounds
            devices[0].gate.set()
            server.close(is_done=True)
    plain = DeviceTask()
    net, parts = first_model(plain), plain.partition(3)
    x = [values_of(net)]
    for _ in range(3):
        deltas = [locally_trained(net, x[-1], parts[i]) - x[-1] for i in range(2)]
        total = len(parts[0]) + len(parts[1])
        x.append(x[-1] + sum(len(parts[i]) / total * deltas[i] for i in range(2)))
    fresh, stale = locally_trained(net, x[3], parts[1]) - x[3], locally_trained(net, x[0], parts[2]) - x[0]
    total = len(parts[1]) + len(parts[2])
    x.append(x[3] + len(parts[1]) / total * fresh + len(parts[2]) / total / 2 * stale)  # 1 / sqrt(1 + 3)
    torch.testing.assert_close(task.seen, x[1:], rtol=0, atol=1e-5)
    assert [record.figures["staleness"] for record in records] == [0, 0, 0, 1.5]
    assert all(isinstance(sent, int) for sent in results), results


def test_codecs_and_their_feedback_on_devices_give_the_weights_of_virtual_clients(tmp_path: Path) -> None:
    config = FederatedConfig(
        rounds=4,
        clients_per_round=3,
        min_clients=3,
        local_epochs=EPOCHS,
        upload="topk:0.1",
        download="fp16",
        error_feedback=True,
    )
    virtual, real = DeviceTask(), DeviceTask()
    simulated = simulate(virtual, num_clients=3, config=config).rounds
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path / "server", config))
        clients = [client(server, tmp_path, f"d-{i}", token=server.new_token()) for i in range(3)]
        with running(*clients) as results:
            records = RoundLoop(real, config, server).run().rounds
            server.close(is_done=True)
    torch.testing.assert_close(real.seen, virtual.seen, rtol=0, atol=1e-6)
    assert results == [4, 4, 4]
    overhead = records[0].bytes_up - simulated[0].bytes_up
    assert 0 < overhead < 3 * 400, "fields of the update beside its vector"
