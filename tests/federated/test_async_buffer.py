"""Buffered rounds have the weights of a plain loop over the same arrivals, whoever is late."""

from __future__ import annotations

import heapq
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.federated.small_task import SmallTask
from tests.federated.strategies.test_equations import EPOCHS, first_model, locally_trained, values_of
from torsh_distributed.errors import CommunicationError, ConfigurationError
from torsh_distributed.federated import (
    AsyncBuffer,
    Availability,
    FedAvg,
    FedAvgM,
    FederatedConfig,
    FederatedStrategy,
    Median,
    Scaffold,
    simulate,
)

CLIENTS = 6


def config(buffer: AsyncBuffer, **fields: object) -> FederatedConfig:
    given = {"rounds": 8, "clients_per_round": CLIENTS, "local_epochs": EPOCHS, "buffer": buffer}
    return FederatedConfig(**{**given, **fields})  # type: ignore[arg-type]


def plain_arrivals(num_rounds: int, size: int, seconds: list[float]) -> list[list[tuple[int, int]]]:
    """All clients work all the time: (client, staleness) of each round. A client gets a model once."""
    waiting = [(time, client, 0) for client, time in enumerate(seconds)]
    heapq.heapify(waiting)
    idle: list[int] = []
    now, rounds = 0.0, []
    for step in range(num_rounds):
        taken: list[tuple[int, int]] = []
        for client in idle:
            heapq.heappush(waiting, (now + seconds[client], client, step))
        idle = []
        while len(taken) < size:
            now, client, version = heapq.heappop(waiting)
            taken.append((client, step - version))
            if version < step:
                heapq.heappush(waiting, (now + seconds[client], client, step))
            else:
                idle.append(client)
        rounds.append(taken)
    return rounds


@pytest.mark.parametrize(("strategy", "exponent"), [(FedAvg(), 0.5), (FedAvg(server_lr=0.7), 0.0), (FedAvgM(), 0.5)])
def test_weights_are_those_of_a_plain_loop_of_the_same_arrivals(strategy: FederatedStrategy, exponent: float) -> None:
    task, size = SmallTask(), 3
    availability = Availability(speed_spread=1.0)
    simulate(
        task,
        num_clients=CLIENTS,
        config=config(AsyncBuffer(size=size, staleness_exponent=exponent), strategy=strategy),
        availability=availability,
    )
    plain = SmallTask()
    net, parts = first_model(plain), plain.partition(CLIENTS)
    seconds = [availability.duration_s(str(client), EPOCHS * len(part)) for client, part in enumerate(parts)]
    arrivals = plain_arrivals(8, size, seconds)
    assert max(staleness for taken in arrivals for _, staleness in taken) > 2
    models: list[Tensor] = [values_of(net)]
    velocity = torch.zeros_like(models[0])
    for taken in arrivals:
        update = torch.zeros_like(velocity)
        total = sum(len(parts[client]) for client, _ in taken)
        for client, staleness in taken:
            start = models[len(models) - 1 - staleness]
            delta = locally_trained(net, start, parts[client]) - start
            update += len(parts[client]) / total / (1 + staleness) ** exponent * delta
        velocity = update + getattr(strategy, "momentum", 0.0) * velocity
        models.append(models[-1] + strategy.server_lr * velocity)
    torch.testing.assert_close(task.seen, models[1:], rtol=0, atol=1e-5)


def test_a_buffer_for_all_clients_of_one_speed_is_a_round() -> None:
    buffered, synchronous = SmallTask(), SmallTask()
    availability = Availability(speed_spread=0.0)
    simulate(buffered, num_clients=CLIENTS, config=config(AsyncBuffer(size=CLIENTS)), availability=availability)
    rounds = FederatedConfig(rounds=8, clients_per_round=CLIENTS, local_epochs=EPOCHS)
    simulate(synchronous, num_clients=CLIENTS, config=rounds)
    torch.testing.assert_close(buffered.seen, synchronous.seen, rtol=0, atol=1e-6)


@pytest.mark.ranks
def test_it_goes_on_where_it_was_and_does_not_depend_on_workers(tmp_path: Path) -> None:
    availability = Availability(dropout=0.2, stragglers=0.3)
    settings = config(AsyncBuffer(size=4, max_staleness=3), clients_per_round=5)
    whole, parts = SmallTask(), SmallTask()
    simulate(whole, num_clients=12, config=settings, availability=availability)
    for rounds in (3, 8):
        some = config(AsyncBuffer(size=4, max_staleness=3), clients_per_round=5, rounds=rounds)
        result = simulate(
            parts, num_clients=12, config=some, availability=availability, directory=tmp_path, num_workers=rounds // 3
        )
    torch.testing.assert_close(parts.seen[:3], whole.seen[:3], rtol=0, atol=0)
    assert [record.num_updates for record in result.rounds] == [4] * 8
    assert max(record.figures["staleness"] for record in result.rounds) > 0


def test_what_is_too_old_does_not_count_and_what_cannot_be_filled_is_said() -> None:
    result = simulate(
        SmallTask(),
        num_clients=CLIENTS,
        config=config(AsyncBuffer(size=2, max_staleness=1)),
        availability=Availability(speed_spread=2.0),
    )
    reasons = {reason for record in result.rounds for reason in record.failures}
    assert any("and max_staleness is 1" in reason for reason in reasons), reasons
    with pytest.raises(CommunicationError, match="round 0 got 0 updates in 3 attempts"):
        simulate(SmallTask(), num_clients=3, config=config(AsyncBuffer(size=2)), availability=Availability(dropout=1.0))


def test_what_needs_one_model_for_all_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a robust rule needs updates that began with the same model"):
        config(AsyncBuffer(), rule=Median(hostile=0))
    with pytest.raises(ConfigurationError, match="strategy 'scaffold' needs updates that began with the same model"):
        config(AsyncBuffer(), strategy=Scaffold())
    with pytest.raises(ConfigurationError, match="min_clients=5, buffer_size=4"):
        config(AsyncBuffer(size=4), min_clients=5)
    with pytest.raises(ConfigurationError, match="stale updates would weigh more"):
        AsyncBuffer(staleness_exponent=-1)
