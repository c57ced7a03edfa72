"""Elastic averaging against its equations in one process, and local SGD with torch's averagers on our ranks."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from tests.bed.world import World
from torsh_distributed.comm.store import open_store
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.rpc import RpcWorker
from torsh_distributed.rpc.parameters import ParameterServer
from torsh_distributed.train.optimizers import ElasticAveragingSGD

RATE, ALPHA, PERIOD, STEPS = 0.1, 0.3, 3, 7


def target_of(rank: int) -> Tensor:
    return torch.arange(4.0) * (rank + 1)


def by_the_equations(num_ranks: int) -> tuple[list[Tensor], Tensor]:
    """Loss |x - target|² / 2: the gradient is x - target."""
    xs, center = [torch.ones(4) for _ in range(num_ranks)], torch.ones(4)
    for step in range(1, STEPS + 1):
        xs = [x - RATE * (x - target_of(rank)) for rank, x in enumerate(xs)]
        if step % PERIOD == 0:
            pulls = [ALPHA * (x - center) for x in xs]
            xs = [x - pull for x, pull in zip(xs, pulls, strict=True)]
            center = center + torch.stack(pulls).sum(dim=0)
    return xs, center


def elastic(resume_at: int | None) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    param = nn.Parameter(torch.ones(4) * (rank + 1))  # replaced by that of rank 0
    optimizer = ElasticAveragingSGD([param], lr=RATE, alpha=ALPHA, period=PERIOD)
    for step in range(STEPS):
        if step == resume_at:
            kept, state = param.detach().clone(), optimizer.state_dict()
            optimizer.finish()
            param = nn.Parameter(torch.zeros(4))
            optimizer = ElasticAveragingSGD([param], lr=RATE, alpha=ALPHA, period=PERIOD)
            param.data.copy_(kept)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        ((param - target_of(rank)).square().sum() / 2).backward()
        optimizer.step()
    own = param.detach().clone()
    with optimizer.at_center():
        center = param.detach().clone()
    assert torch.equal(param, own)
    optimizer.finish()
    assert torch.equal(param, center)
    return own, center


@pytest.mark.parametrize("resume_at", [None, 5])
def test_ranks_and_centre_follow_the_equations(world: World, resume_at: int | None) -> None:
    xs, center = by_the_equations(3)
    for rank, (own, found) in enumerate(world.run(elastic, resume_at, num_ranks=3)):
        torch.testing.assert_close(own, xs[rank])
        torch.testing.assert_close(found, center)


def refused() -> list[str]:
    found = []
    for options in ({"alpha": 1.0}, {"alpha": -0.1}, {"period": 0}):
        with pytest.raises(InvalidArgument) as caught:
            ElasticAveragingSGD([nn.Parameter(torch.ones(1))], **options)
        found.append(str(caught.value))
    return found


def test_what_would_diverge_is_refused(world: World) -> None:
    for texts in world.run(refused):
        assert "alpha=1.0, num_workers=2" in texts[0]
        assert "alpha=-0.1" in texts[1]
        assert "period=0" in texts[2]


def by_the_equations_one_after_the_other(turns: list[int]) -> tuple[list[Tensor], Tensor]:
    xs, center, steps = [torch.ones(4), torch.ones(4)], torch.ones(4), [0, 0]
    for rank in turns:
        xs[rank] = xs[rank] - RATE * (xs[rank] - target_of(rank))
        steps[rank] += 1
        if steps[rank] % PERIOD == 0:
            apart = ALPHA * (xs[rank] - center)
            xs[rank], center = xs[rank] - apart, center + apart
    return xs, center


def test_without_waiting_each_worker_meets_the_centre_when_it_is_due() -> None:
    turns = [0, 0, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 1]
    expected, expected_center = by_the_equations_one_after_the_other(turns)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store("memory://"))
        stack.enter_context(ParameterServer("ps", store=store))
        workers = [stack.enter_context(RpcWorker(f"w{rank}", store)) for rank in range(2)]
        params = [nn.Parameter(torch.ones(4)) for _ in range(2)]
        optimizers = [
            ElasticAveragingSGD(
                [param],
                lr=RATE,
                alpha=ALPHA,
                period=PERIOD,
                consistency="async",
                servers=["ps"],
                num_workers=2,
                worker=worker,
            )
            for param, worker in zip(params, workers, strict=True)
        ]
        for rank in turns:
            optimizers[rank].zero_grad()
            ((params[rank] - target_of(rank)).square().sum() / 2).backward()
            optimizers[rank].step()
        with optimizers[0].at_center():
            torch.testing.assert_close(params[0].detach(), expected_center)
        for param, value in zip(params, expected, strict=True):
            torch.testing.assert_close(param.detach(), value)
        for optimizer in optimizers:
            optimizer._served.client.close()


def local_sgd() -> Tensor:
    param = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=RATE)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
    for _ in range(6):
        optimizer.zero_grad()
        ((param - target_of(dist.get_rank())).square().sum() / 2).backward()
        optimizer.step()
        averager.average_parameters([param])
    return param.detach()


def test_local_sgd_is_torchs_own_on_our_ranks(world: World) -> None:
    """Averages after steps 1 and 4 (torch counts from 0), as one process computes them."""
    xs = [torch.ones(4) for _ in range(2)]
    for step in range(6):
        xs = [x - RATE * (x - target_of(rank)) for rank, x in enumerate(xs)]
        if step % PERIOD == 0:
            xs = [torch.stack(xs).mean(dim=0)] * 2
    for rank, found in enumerate(world.run(local_sgd, backend="shm")):
        torch.testing.assert_close(found, xs[rank])
