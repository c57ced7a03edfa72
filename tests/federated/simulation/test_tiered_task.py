"""Tiers: the flat mean where periods are one, a nested plain loop where they are not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from tests.federated.small_task import Points, SmallTask
from tests.federated.strategies.test_equations import EPOCHS, first_model, locally_trained, values_of
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.federated import FederatedConfig, FedProx, TieredTask, simulate

CLIENTS, EDGES, FOGS = 2, 2, 2
ALL = CLIENTS * EDGES * FOGS
CONFIG = FederatedConfig(rounds=3, clients_per_round=ALL, local_epochs=EPOCHS)


def tiers(task: SmallTask, edge_period: int, fog_period: int) -> TieredTask:
    edge = TieredTask(task, clients=CLIENTS, period=edge_period)
    return TieredTask(edge, clients=EDGES, period=fog_period)


def test_with_periods_of_one_it_is_the_flat_mean() -> None:
    flat, tiered = SmallTask(), SmallTask()
    simulate(flat, num_clients=ALL, config=CONFIG)
    simulate(tiers(tiered, 1, 1), num_clients=FOGS, config=CONFIG)
    torch.testing.assert_close(tiered.seen, flat.seen, rtol=0, atol=1e-6)


def mean(vectors: list[Tensor], sizes: list[int]) -> Tensor:
    total = torch.zeros_like(vectors[0])
    for vector, size in zip(vectors, sizes, strict=True):
        total += size / sum(sizes) * vector
    return total


def test_each_tier_aggregates_at_its_own_period() -> None:
    edge_period, fog_period = 3, 2
    task = SmallTask()
    simulate(tiers(task, edge_period, fog_period), num_clients=FOGS, config=CONFIG)
    plain = SmallTask()
    net, parts = first_model(plain), plain.partition(ALL)
    cloud = values_of(net)
    for number in range(3):
        fogs, fog_sizes = [], []
        for fog in range(FOGS):
            x = cloud
            for _ in range(fog_period):
                edges, edge_sizes = [], []
                for edge in range(EDGES):
                    first = (fog * EDGES + edge) * CLIENTS
                    group = parts[first : first + CLIENTS]
                    y = x
                    for _ in range(edge_period):
                        y = mean([locally_trained(net, y, part) for part in group], [len(part) for part in group])
                    edges.append(y)
                    edge_sizes.append(sum(map(len, group)))
                x = mean(edges, edge_sizes)
            fogs.append(x)
            fog_sizes.append(sum(edge_sizes))
        cloud = mean(fogs, fog_sizes)
        torch.testing.assert_close(task.seen[number], cloud, rtol=0, atol=1e-5)


class OddClient(SmallTask):
    """Clients with `odd` samples fail."""

    odd = (4, 7)

    def train(self, model: nn.Module, data: Points, epochs: int) -> Mapping[str, float]:
        if len(data) in self.odd:
            raise KeyError("lost")
        return super().train(model, data, epochs)


def test_a_client_is_left_out_by_itself_and_an_aggregator_without_any_by_itself() -> None:
    task = OddClient()
    config = FederatedConfig(rounds=1, clients_per_round=3)
    record = simulate(TieredTask(task, clients=2), num_clients=3, config=config).rounds[0]
    assert record.failures == {"no client of an aggregator delivered: KeyError: 'lost'": 1}
    assert record.num_updates == 2
    task.odd = (7, 13)  # one of each of the first two groups
    assert simulate(TieredTask(task, clients=2), num_clients=3, config=config).rounds[0].num_updates == 3


def test_what_would_not_reach_the_clients_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one client and one round"):
        TieredTask(SmallTask(), clients=3, period=0)
    config = FederatedConfig(rounds=1, clients_per_round=2, strategy=FedProx())
    with pytest.raises(Exception, match="took no step of an optimizer of torch"):
        simulate(TieredTask(SmallTask(), clients=2), num_clients=2, config=config)
