"""Ranks on lab hosts: collectives cross the links, and stop when a link is cut."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.bed.world import World
from tests.lab.network import Lab

pytestmark = pytest.mark.ranks


def where_am_i() -> tuple[str, str, str, str]:
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return (socket.gethostname(), *(os.environ[name] for name in names))  # type: ignore[return-value]


def reduce_ones(numel: int) -> float:
    bucket = torch.ones(numel)
    dist.all_reduce(bucket)
    return bucket.sum().item()


def meet_through_the_environment() -> float:
    """Start like a launcher's worker: a TCP store on the first host."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    total = reduce_ones(10)
    dist.destroy_process_group()
    return total


def train(num_steps: int) -> list[float]:
    """Gradients of one linear layer under DDP: each rank has its own half of the batch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(8, 256).chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_alone(num_steps: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(8, 256)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_rank_finds_itself_on_its_host(world: World, lab: Lab) -> None:
    a, b = lab.hosts(2)
    assert world.run(where_am_i, num_ranks=3, backend=None, hosts=[a, b, b]) == [
        ("node0", "0", "1", "0"),
        ("node1", "0", "2", "1"),
        ("node1", "1", "2", "1"),
    ]


def test_an_all_reduce_crosses_the_link(world: World, lab: Lab) -> None:
    hosts = lab.hosts(2)
    before = [host.counters() for host in hosts]
    assert world.run(reduce_ones, 1_000_000, hosts=hosts) == [2e6, 2e6]
    for host, earlier in zip(hosts, before, strict=True):
        crossed = host.counters() - earlier
        # Two ranks must each send the other half of 4 MB of float32 and then the reduced half.
        assert crossed.tx_bytes > 4_000_000
        assert crossed.rx_bytes > 4_000_000


def test_ranks_on_one_host_leave_its_link_alone(world: World, lab: Lab) -> None:
    a, _ = lab.hosts(2)
    before = a.counters()
    assert world.run(reduce_ones, 1_000_000, hosts=[a, a]) == [2e6, 2e6]
    assert (a.counters() - before).tx_bytes < 100_000


@pytest.mark.parametrize("env", [{}, {"GLOO_SOCKET_IFNAME": "eth0"}], ids=["by host name", "by interface"])
def test_hosts_meet_through_a_store_on_the_first(world: World, lab: Lab, env: dict[str, str]) -> None:
    assert world.run(meet_through_the_environment, backend=None, hosts=lab.hosts(2), env=env) == [20.0, 20.0]


def test_data_parallel_training_between_hosts_matches_one_process(world: World, lab: Lab) -> None:
    hosts = lab.hosts(2)
    for host in hosts:
        host.limit(1.0)
    by_rank = world.run(train, 4, hosts=hosts)
    together = [sum(losses) / 2 for losses in zip(*by_rank, strict=True)]
    assert together == pytest.approx(train_alone(4), rel=1e-5)


def test_a_cut_link_stops_a_collective(world: World, lab: Lab) -> None:
    a, b = lab.hosts(2)
    b.link_down()
    outcomes = world.outcomes(reduce_ones, 10, hosts=[a, b], timeout_s=3.0)
    assert not any(outcome.is_ok for outcome in outcomes)
