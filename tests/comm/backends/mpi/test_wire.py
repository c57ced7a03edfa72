"""What is the wire's own: bits equal on every rank, NaN, messages beyond MPI's counts, tensors scattered in memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.comm.backends import test_collectives as collectives
from tests.comm.backends import test_point_to_point as messages
from tests.comm.backends.mpi.world import MpiWorld
from torsh_distributed.comm.backends.mpi import datatypes, wire

pytestmark = pytest.mark.needs_mpi


def random_sums() -> list[Tensor]:
    results = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for numel in (10, 3000, 300_000):
            torch.manual_seed(dist.get_rank())
            tensor = torch.randn(numel).to(dtype)
            dist.all_reduce(tensor)
            results.append(tensor)
    return results


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_every_rank_gets_the_same_bits(mpi_world: MpiWorld, num_ranks: int) -> None:
    first, *others = mpi_world.run(random_sums, num_ranks=num_ranks)
    for other in others:
        assert all(map(torch.equal, first, other))


def extremes_with_nan(dtype: torch.dtype) -> list[Tensor]:
    rank = dist.get_rank()
    results = []
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        # In place 0 rank 0 has NaN, in place 1 rank 1, and so on; the last place has numbers only.
        tensor = torch.full((dist.get_world_size() + 1,), float(rank), dtype=dtype)
        tensor[rank] = float("nan")
        dist.all_reduce(tensor, op)
        results.append(tensor)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_nan_wins_whatever_rank_has_it(mpi_world: MpiWorld, dtype: torch.dtype) -> None:
    for least, most in mpi_world.run(extremes_with_nan, dtype, num_ranks=3):
        assert least[:3].isnan().all()
        assert most[:3].isnan().all()
        assert (least[3].item(), most[3].item()) == (0.0, 2.0)


def with_small_limits() -> None:
    """All cases again, with messages far beyond what one call is said to take."""
    datatypes.MAX_COUNT, datatypes._BLOCK_BYTES = 1000, 64
    wire.MAX_COUNT, wire._CHUNK_NUMEL = 1000, 700
    collectives.reduce_everything()
    collectives.copy_everything()
    collectives.unequal_sizes()
    messages.ring_of_neighbours()


def test_tensors_beyond_the_counts_of_mpi(mpi_world: MpiWorld) -> None:
    mpi_world.run(with_small_limits, num_ranks=2, timeout_s=100)


def gather_in_place() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(size, 100)
    whole[rank] = rank + 1
    dist.all_gather_single(whole.view(-1), whole[rank])
    assert whole[:, 0].tolist() == [float(one + 1) for one in range(size)]

    # Half of the ranks give tensors of one block, the others tensors scattered in memory, even in reverse.
    block = torch.zeros(size, 100)
    outputs = list(block) if rank % 2 else [row.clone() for row in block.flip(0)]
    dist.all_gather(outputs, torch.full((100,), float(rank)))
    assert [output[-1].item() for output in outputs] == [float(one) for one in range(size)]

    sources = [torch.full((50,), float(rank + one)) for one in range(size)]
    if rank % 2:
        sources = list(torch.stack(sources))
    output = torch.empty(50)
    dist.reduce_scatter(output, sources)
    assert output.unique().tolist() == [float(sum(one + rank for one in range(size)))]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_need_not_agree_where_their_tensors_lie(mpi_world: MpiWorld, num_ranks: int) -> None:
    mpi_world.run(gather_in_place, num_ranks=num_ranks)


def test_a_receive_from_anyone_says_from_whom(mpi_world: MpiWorld) -> None:
    assert sorted(mpi_world.run(messages.from_anyone, num_ranks=4)[0]) == [1, 2, 3]


def send_without_waiting() -> bool:
    """A work that nobody waits for ends too: the group's own thread asks MPI about it."""
    rank = dist.get_rank()
    tensor = torch.full((messages.LARGE,), float(rank))
    request = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    assert request is not None
    future = request.get_future()
    future.wait()
    return tensor.eq(0).all().item() is True and request.is_completed()


def test_a_future_of_a_message_ends_without_a_wait(mpi_world: MpiWorld) -> None:
    assert mpi_world.run(send_without_waiting) == [True, True]
