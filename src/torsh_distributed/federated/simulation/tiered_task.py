"""Tiers: aggregators between clients and server, each adding up its own clients at its own period.

    edge = TieredTask(task, clients=20, period=5)      an edge node has 20 clients, and reports after 5 rounds with them
    fog = TieredTask(edge, clients=4, period=2)        a fog node has 4 edge nodes, and reports after 2 rounds with them
    simulate(fog, num_clients=3)                       the cloud has 3 fog nodes

With a period of 1 in every tier the model is that of the flat mean over all clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from torsh_distributed.errors import CommunicationError, ConfigurationError, InvalidArgument, first_line
from torsh_distributed.federated.federated_task import FederatedTask
from torsh_distributed.federated.local_training import train_client
from torsh_distributed.federated.model_vector import ModelVector
from torsh_distributed.federated.rounds.round_order import RoundOrder, RoundReplies, UpdateIntake
from torsh_distributed.federated.strategies.averaging import FedAvg


class TieredTask(FederatedTask):
    """A task whose clients are aggregators: each takes FedAvg steps with clients of its own, then its model counts.

    The server's strategy sees aggregators only; what it would add to local training does not reach their clients, so
    strategies with such terms are refused.
    """

    def __init__(self, task: FederatedTask, *, clients: int, period: int = 1) -> None:
        """`clients` of each aggregator; `period`: how many rounds it has with them for each round above it."""
        if clients < 1 or period < 1:
            raise InvalidArgument("an aggregator has at least one client and one round", clients=clients, period=period)
        self.config = task.config
        self._task = task
        self._num_clients = clients
        self._period = period
        self._replica: ModelVector | None = None

    @override
    def model(self) -> nn.Module:
        return self._task.model()

    @override
    def partition(self, num_clients: int) -> Sequence[Any]:
        """For each aggregator the data of its clients."""
        each = self._num_clients
        parts = self._task.partition(num_clients * each)
        return [list(parts[index * each : (index + 1) * each]) for index in range(num_clients)]

    @override
    def num_samples(self, data: Any) -> int:
        return sum(self._task.num_samples(part) for part in data)

    @override
    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return self._task.evaluate(model)

    @override
    def train(self, model: nn.Module, data: Any, epochs: int) -> Mapping[str, float]:
        """The aggregator's rounds. A client that fails is left out of its round; without any, the aggregator fails."""
        seed = int(torch.randint(2**62, ()))  # from the generator that was seeded for this aggregator and round
        whole = ModelVector(model)
        vector = whole.read()
        if self._replica is None:  # behind the seed: a process's first aggregator draws what any other would
            self._replica = ModelVector(self._task.model())
            self._replica.take_integers(whole)
        replies = RoundReplies()
        for number in range(self._period):
            order = RoundOrder(
                round=number,
                attempt=0,
                model=vector,
                num_trained=whole.num_trained,
                num_parameters=whole.num_parameters,
                epochs=epochs,
                seed=seed,
            )
            replies = self._round(self._replica, order, data)
            vector = vector + replies.total.mean(vector.dtype).delta
        whole.write(vector)
        return {
            name: sum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs)
            for name, pairs in replies.figures.items()
        }

    def _round(self, replica: ModelVector, order: RoundOrder, data: Sequence[Any]) -> RoundReplies:
        intake = UpdateIntake(FedAvg(), order, None)
        for index, part in enumerate(data):
            client = str(index)
            try:
                update, _ = train_client(self._task, replica, order.model, part, order.work_of(client), {})
            except ConfigurationError:
                raise  # no client can do what is asked
            except Exception as error:  # of the task's own code, on this client's data
                intake.replies.failures[client] = f"{type(error).__name__}: {first_line(error)}"
                continue
            intake.take(update)
        if not intake.replies.num_updates:
            reason = next(iter(intake.replies.failures.values()), "it has no clients")
            raise CommunicationError(f"no client of an aggregator delivered: {reason}")
        return intake.replies
