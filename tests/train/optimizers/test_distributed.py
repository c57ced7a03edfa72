"""DistributedOptimizer: unwrapped models that train as one process would on the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.train.optimizers import DistributedOptimizer

SYNCS = ("all_reduce", "all_gather", "reduce_scatter")


class Net(nn.Module):
    """A shared weight, one that no step uses, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, points: Tensor) -> Tensor:
        return self.last(self.frozen(torch.tanh(self.first(torch.tanh(self.first(points))))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 5, generator=generator), torch.randn(12, 3, generator=generator)


def plain() -> dict[str, Tensor]:
    model = Net()
    optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        functional.mse_loss(model(batch(step)[0]), batch(step)[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model.state_dict()


def train(sync: str, bucket_mb: float, overlap: bool, accumulate: bool) -> dict[str, Tensor]:
    model = Net()
    if dist.get_rank():
        model.first.weight.data.zero_()  # replaced by that of rank 0
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = DistributedOptimizer(
        torch.optim.Adam(params, lr=0.01),
        sync=sync,
        bucket_mb=bucket_mb,
        overlap=overlap,  # type: ignore[arg-type]
    )
    for step in range(6):
        optimizer.zero_grad()
        points, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch(step))
        if accumulate:
            with optimizer.no_sync():
                (functional.mse_loss(model(points[:2]), targets[:2]) * 2 / len(points)).backward()
            (functional.mse_loss(model(points[2:]), targets[2:]) * (1 - 2 / len(points))).backward()
        else:
            functional.mse_loss(model(points), targets).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(params, 0.3)
        optimizer.step()
    return model.state_dict()


def every_way() -> list[dict[str, Tensor]]:
    ways = [(sync, size, True, False) for sync in SYNCS for size in (25.0, 1e-4)]
    return [train(*way) for way in [*ways, ("all_reduce", 1e-4, False, False), ("reduce_scatter", 1e-4, True, True)]]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_way_of_averaging_trains_as_one_process(world: World, num_ranks: int) -> None:
    expected = plain()
    for states in world.run(every_way, num_ranks=num_ranks):
        for state in states:
            torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)


def second_backward() -> None:
    model = Net()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.first.parameters(), lr=0.1))
    for _ in range(2):
        model(batch(0)[0]).sum().backward()
    optimizer.step()


def test_a_second_backward_without_no_sync_is_refused(world: World) -> None:
    with pytest.raises(InvalidArgument, match=r"second backward(?s:.*)no_sync"):
        world.run(second_backward, num_ranks=1)


def wrong(**options: object) -> None:
    DistributedOptimizer(torch.optim.SGD(Net().parameters(), lr=0.1), **options)  # type: ignore[arg-type]


def refusals() -> list[str]:
    found = []
    for options in ({"sync": "gossip"}, {"bucket_mb": 0}):
        with pytest.raises(InvalidArgument) as caught:
            wrong(**options)
        found.append(str(caught.value))
    return found


def test_mistakes_are_refused(world: World) -> None:
    [[sync, size]] = world.run(refusals, num_ranks=1)
    assert "sync=gossip" in sync
    assert "bucket_mb=0" in size
