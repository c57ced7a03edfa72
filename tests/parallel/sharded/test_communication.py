"""FSDP2's two allocations of a reduce-scatter: told apart by their sizes, and refused if they are used otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.world import World
from torsh_distributed.errors import InternalError
from torsh_distributed.parallel.sharded.communication import CommTally, TalliedReduceScatter


def buffers(scatter: TalliedReduceScatter, *numels: int) -> list[Tensor]:
    cpu = torch.device("cpu")
    return [scatter.allocate((numel,), dtype=torch.float32, device=cpu) for numel in numels]


def reduce_after(numels: tuple[int, ...], source: int, output: int) -> list[float]:
    """Allocate in this order and reduce with the buffers at these places: rank r gives r + 0, r + 1, …"""
    group = dist.group.WORLD
    assert group is not None
    scatter = TalliedReduceScatter(CommTally(), group, lambda: None)
    made = buffers(scatter, *numels)
    made[source].copy_(torch.arange(float(made[source].numel())) + dist.get_rank())
    scatter(output_tensor=made[output], input_tensor=made[source], group=group, op=dist.ReduceOp.SUM)
    return made[output].tolist()


@pytest.mark.ranks
def test_the_source_is_the_allocation_before_a_shard_of_its_size(world: World) -> None:
    results = world.run(reduce_after, (6, 3), 0, 1, num_ranks=2, backend="torsh")
    assert results == [[1.0, 3.0, 5.0], [7.0, 9.0, 11.0]]


@pytest.mark.ranks
def test_a_source_that_a_failed_backward_left_is_forgotten(world: World) -> None:
    results = world.run(reduce_after, (6, 6, 3), 1, 2, num_ranks=2, backend="torsh")
    assert results == [[1.0, 3.0, 5.0], [7.0, 9.0, 11.0]]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("numels", "source", "output"),
    [
        pytest.param((3, 6), 1, 0, id="the output first"),
        pytest.param((6, 3, 3), 0, 2, id="an output between"),
        pytest.param((6, 4), 0, 1, id="an output of another size"),
    ],
)
def test_another_order_of_allocations_is_refused(
    world: World, numels: tuple[int, ...], source: int, output: int
) -> None:
    with pytest.raises(InternalError, match="FSDP2 allocates the buffers of a reduce-scatter in another way"):
        world.run(reduce_after, numels, source, output, num_ranks=2, backend="torsh")
