"""Virtual clients in one process: one model, in which clients are trained one after the other."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torsh_distributed.errors import ConfigurationError, InvalidArgument, TorshError, first_line
from torsh_distributed.federated.federated_config import FederatedConfig
from torsh_distributed.federated.federated_task import FederatedTask
from torsh_distributed.federated.local_training import train_client
from torsh_distributed.federated.model_vector import ModelVector
from torsh_distributed.federated.random_seeds import derived_seed, seed_everything
from torsh_distributed.federated.rounds.round_order import RoundOrder, RoundReplies, UpdateIntake


@dataclass(frozen=True, kw_only=True, slots=True)
class Availability:
    """How clients of a simulation fail to do all that they are asked. Drawn for each client and attempt."""

    dropout: float = 0.0
    """The probability that a client does not answer."""

    stragglers: float = 0.0
    """The probability that a client has time for a part of its epochs only: 1 to one less than all."""

    speed_spread: float = 0.5
    """How unlike clients' speeds are in buffered rounds: the standard deviation of the logarithm of a sample's time."""

    def __post_init__(self) -> None:
        for name in ("dropout", "stragglers"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"{name} is a probability", **{name: getattr(self, name)})
        if not self.speed_spread >= 0:
            raise ConfigurationError("speed_spread must not be negative", speed_spread=self.speed_spread)

    def duration_s(self, client: str, num_samples: int) -> float:
        """Of a client's training, in virtual seconds: a second for a sample at the middle speed, which it keeps."""
        draw = random.Random(derived_seed(client, "speed"))
        return num_samples * math.exp(draw.gauss(0.0, self.speed_spread))

    def epochs_of(self, order: RoundOrder, client: str) -> int | None:
        """The epochs that the client does; None if it does not answer."""
        draw = random.Random(derived_seed(order.seed, order.round, client, "availability"))
        if draw.random() < self.dropout:
            return None
        is_late = draw.random() < self.stragglers
        return draw.randint(1, max(1, order.epochs - 1)) if is_late else order.epochs


@dataclass(kw_only=True, slots=True)
class TrainedShare:
    """What the clients of one process came to."""

    replies: RoundReplies
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """What clients remember if the round counts."""


class VirtualClients:
    """Trains clients by their number, on data that the task has divided."""

    def __init__(
        self, task: FederatedTask, config: FederatedConfig, num_clients: int, availability: Availability
    ) -> None:
        self._task = task
        self._config = config
        self._availability = availability
        # Every process makes the same model, integer buffers too, and the same parts, also if a task draws them.
        seed_everything(derived_seed(config.seed, "model"))
        self._replica = ModelVector(task.model())
        seed_everything(derived_seed(config.seed, "partition"))
        self._parts: Sequence[Any] = task.partition(num_clients)
        if len(self._parts) != num_clients:
            raise InvalidArgument(
                "partition() must return one part for each client",
                num_parts=len(self._parts),
                num_clients=num_clients,
            )

    def sizes(self) -> list[int]:
        """Samples by client."""
        return [self._task.num_samples(part) for part in self._parts]

    def train(
        self, order: RoundOrder, clients: Sequence[str], states: Mapping[str, Mapping[str, Tensor]]
    ) -> TrainedShare:
        """Train these clients, one after the other."""
        intake = UpdateIntake(self._config.strategy, order, self._config.max_update_norm)
        share = TrainedShare(replies=intake.replies)
        intake.replies.bytes_down = order.num_bytes * len(clients)
        for client in clients:
            epochs = self._availability.epochs_of(order, client)
            if epochs is None:
                intake.replies.failures[client] = "it did not answer"
            elif epochs < order.epochs and not self._config.partial_work:
                intake.replies.failures[client] = "it had no time for all epochs"
            else:
                self._train_one(order, client, epochs, states.get(client, {}), intake, share)
        return share

    def _train_one(
        self,
        order: RoundOrder,
        client: str,
        epochs: int,
        state: Mapping[str, Tensor],
        intake: UpdateIntake,
        share: TrainedShare,
    ) -> None:
        data = self._parts[int(client)]
        try:
            update, new_state = train_client(
                self._task, self._replica, order.model, data, order.work_of(client, epochs), state
            )
        except ConfigurationError:
            raise  # no client can do what the strategy asks
        except TorshError as error:
            intake.replies.failures[client] = error.message
            return
        except Exception as error:  # of the task's own code, on this client's data
            intake.replies.failures[client] = f"{type(error).__name__}: {first_line(error)}"
            return
        if order.secure is None:  # masked sums have messages of their own, which a simulation does not make
            intake.replies.bytes_up += update.num_bytes
        if intake.take(update):
            share.states[client] = new_state
