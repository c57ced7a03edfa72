"""AsyncSGD: real pushes from real ranks, a bound on staleness that is kept, the same parameters at the end."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.bed.world import World
from torsh_distributed.errors import CommunicationError, InvalidArgument, OperationTimeout
from torsh_distributed.train.optimizers import AsyncSGD
from torsh_distributed.train.optimizers.async_sgd import Center


def target_of(rank: int) -> Tensor:
    return torch.arange(6.0).view(2, 3) * (rank + 1)


def pull(param: Tensor, rank: int) -> None:
    ((param - target_of(rank)).square().sum() / 2).backward()


def alone(num_steps: int) -> Tensor:
    param = nn.Parameter(torch.zeros(2, 3))
    optimizer = AsyncSGD([param], lr=0.1, staleness=0, momentum=0.9)
    for _ in range(num_steps):
        optimizer.zero_grad()
        pull(param, 0)
        optimizer.step()
    optimizer.finish()
    return param.detach()


def test_a_rank_alone_is_plain_sgd(world: World) -> None:
    plain = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD([plain], lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        pull(plain, 0)
        optimizer.step()
    [found] = world.run(alone, 5, num_ranks=1)
    torch.testing.assert_close(found, plain.detach())


def unequal(staleness: int) -> tuple[Tensor, int | None, int | None]:
    """Rank r makes 20 + 15·r steps: the others go on alone after the shortest has finished."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    points = torch.randn(64, 3)
    truth = torch.tensor([[1.0, -2.0, 0.5]])
    model = nn.Linear(3, 1, bias=False)
    optimizer = AsyncSGD(model.parameters(), lr=0.05, staleness=staleness, server=1)
    for _ in range(20 + 15 * rank):
        optimizer.zero_grad()
        (model(points) - points @ truth.T).square().mean().backward()
        optimizer.step()
    optimizer.finish()
    is_server = rank == 1
    return (
        model.weight.detach() - truth,
        optimizer.num_updates if is_server else None,
        optimizer.max_lead if is_server else None,
    )


@pytest.mark.parametrize(("staleness", "backend"), [(0, "gloo"), (3, "gloo"), (3, "shm")])
def test_ranks_of_other_speed_converge_together_within_the_bound(world: World, staleness: int, backend: str) -> None:
    results = world.run(unequal, staleness, num_ranks=3, backend=backend)
    for error, _, _ in results:
        assert error.abs().max() < 0.01
        torch.testing.assert_close(error, results[0][0], rtol=0, atol=0)
    assert results[1][1] == 20 + 35 + 50
    assert results[1][2] is not None
    assert results[1][2] <= staleness


@settings(max_examples=25)
@given(st.integers(0, 3), st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_the_bound_holds_for_any_speeds(staleness: int, steps: list[int]) -> None:
    center = Center([torch.zeros(2)], range(len(steps)), staleness=staleness, timeout_s=30, lr=1.0)

    def push(rank: int) -> None:
        for _ in range(steps[rank]):
            center.push(rank, torch.ones(2))
        center.leave(rank)

    threads = [threading.Thread(target=push, args=(rank,)) for rank in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert center.max_lead <= staleness
    assert center.num_updates == sum(steps)
    assert center.flat().tolist() == [-sum(steps)] * 2


def test_a_rank_too_far_ahead_waits_and_names_the_slow_one() -> None:
    center = Center([torch.zeros(1)], range(3), staleness=1, timeout_s=0.1, lr=1.0)
    center.push(2, torch.ones(1))
    center.push(0, torch.ones(1))
    with pytest.raises(OperationTimeout, match=r"missing_ranks=\[1\], staleness=1"):
        center.push(0, torch.ones(1))
    center.leave(1)
    center.push(2, torch.ones(1))
    assert center.push(0, torch.ones(1)).tolist() == [-5.0]


def lose_a_rank() -> str:
    param = nn.Parameter(torch.zeros(2, 3))
    optimizer = AsyncSGD([param], lr=0.1, staleness=2)
    for step in range(8):
        if dist.get_rank() == 2 and step == 3:
            os._exit(3)
        optimizer.zero_grad()
        pull(param, 0)
        optimizer.step()
    try:
        optimizer.finish()
    except CommunicationError as error:
        return type(error).__name__
    return "finished"


def test_a_lost_rank_does_not_stop_the_others_and_is_reported(world: World) -> None:
    server, other, lost = world.outcomes(lose_a_rank, num_ranks=3)
    assert lost.exit_code == 3
    assert other.value == "finished"
    assert server.value is not None
    assert server.value != "finished"


def refused() -> list[str]:
    found = []
    param = nn.Parameter(torch.zeros(1))
    for options in ({"staleness": -1}, {"server": 5}):
        with pytest.raises(InvalidArgument) as caught:
            AsyncSGD([param], **options)  # type: ignore[arg-type]
        found.append(str(caught.value))
    optimizer = AsyncSGD([param])
    optimizer.finish()
    with pytest.raises(InvalidArgument) as caught:
        optimizer.step()
    return [*found, str(caught.value)]


def test_mistakes_are_refused(world: World) -> None:
    [[staleness, server, late]] = world.run(refused, num_ranks=1)
    assert "staleness=-1" in staleness
    assert "server=5, world_size=1" in server
    assert "after finish()" in late
