"""Whole parameters beside shards: equal at the start, gradients averaged once a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tests.bed.world import World
from torsh_distributed.parallel.data.replicated_params import ReplicatedGradients, broadcast_from_first


def averages() -> list[float]:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    used, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    gradients = ReplicatedGradients([used, unused], group)
    found = []
    for step in range(3):
        used.grad = torch.full((2,), float(rank + 10 * step))
        gradients.average()
        gradients.average()  # a second call, as from clipping and then the optimizer, changes nothing
        assert unused.grad is None
        assert used.grad is not None
        found.append(float(used.grad[0]))
        if step != 1:  # the second step fails before the optimizer has run
            gradients.forget()
        used.grad = None
    return found


def test_gradients_are_averaged_once_a_step_also_after_one_that_failed(world: World) -> None:
    for found in world.run(averages):
        assert found == [0.5, 10.5, 20.5]


def first_ranks_values() -> list[float]:
    group = dist.group.WORLD
    assert group is not None
    tensors = [torch.full((3,), float(dist.get_rank())), torch.full((2,), dist.get_rank() + 5)]
    broadcast_from_first(tensors, group)
    return [float(tensor[0]) for tensor in tensors]


def test_tensors_become_those_of_the_first_rank(world: World) -> None:
    assert world.run(first_ranks_values) == [[0.0, 5.0]] * 2
