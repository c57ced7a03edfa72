"""Rounds of Flower's simulation, in an environment of its own: prints the seconds of each and the accuracy as JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from benchmarks import federated_digits as digits

_PARTS: list[digits.Part] = []


def _read(net: nn.Module) -> list[np.ndarray[Any, Any]]:
    return [value.detach().numpy() for value in net.state_dict().values()]


def _write(net: nn.Module, arrays: list[np.ndarray[Any, Any]]) -> None:
    net.load_state_dict({name: torch.tensor(array) for name, array in zip(net.state_dict(), arrays, strict=True)})


class Client(NumPyClient):
    """One of the virtual ones."""

    def __init__(self, part: digits.Part) -> None:
        self.part = part

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        """A client's part of a round."""
        net = digits.model()
        _write(net, parameters)
        digits.train(net, self.part)
        return _read(net), len(self.part.labels), {}


def _client(context: Context) -> Any:
    torch.set_num_threads(1)
    if not _PARTS:  # once in each of Ray's processes
        _PARTS.extend(digits.parts())
    return Client(_PARTS[int(context.node_config["partition-id"])]).to_client()


class Clocked(FedAvg):
    """Notes the end of each round."""

    times: list[float]
    arrays: list[Any]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """As FedAvg; a lost client would flatter the time."""
        assert not failures, failures
        assert len(results) == digits.PER_ROUND
        done = super().aggregate_fit(server_round, results, failures)
        self.times.append(time.perf_counter())
        self.arrays = parameters_to_ndarrays(done[0])
        return done


def main(num_rounds: int) -> None:
    """Run and print. The first round starts Ray's processes; it ends the warm-up."""
    strategy = Clocked(
        fraction_fit=1e-6,  # of the nodes that have come so far; the number decides
        min_fit_clients=digits.PER_ROUND,
        fraction_evaluate=0.0,
        min_available_clients=digits.NUM_CLIENTS,
        initial_parameters=ndarrays_to_parameters(_read(digits.model())),
    )
    strategy.times = []

    def server(context: Context) -> ServerAppComponents:
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=num_rounds + 1))

    run_simulation(
        server_app=ServerApp(server_fn=server),
        client_app=ClientApp(client_fn=_client),
        num_supernodes=digits.NUM_CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    net = digits.model()
    _write(net, strategy.arrays)
    times = [after - before for before, after in zip(strategy.times, strategy.times[1:], strict=False)]
    print(json.dumps({"times": times, "accuracy": digits.accuracy(net)}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
