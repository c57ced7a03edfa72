"""Ranks on one GPU: every collective and message gives what it gives in the host's memory, on any stream."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bed.world import World
from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.shared_gpu.gpu_memory import SLOT_BYTES
from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.errors import CommunicationError, TensorShapeMismatch, TorshError

pytestmark = [pytest.mark.ranks, pytest.mark.needs_cuda]

SMALL, LARGE = 1000, SLOT_BYTES // 4 + 30_011
"""Elements: through the host, and in the GPU's memory in more than one round."""
Values = Callable[[int, torch.dtype], Tensor]


def values(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Whole numbers, so that sums have one value in any order; the same on all ranks."""
    numbers = torch.arange(numel) % 13 + rank
    return (numbers % 2).bool() if dtype is torch.bool else numbers.to(dtype)


def all_reduced(make: Values, numel: int, dtype: torch.dtype) -> list[Tensor]:
    tensor = make(numel, dtype)
    dist.all_reduce(tensor)
    return [tensor]


def maximum(make: Values, numel: int, dtype: torch.dtype) -> list[Tensor]:
    tensor = make(numel, dtype)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [tensor]


def reduced(make: Values, numel: int, dtype: torch.dtype) -> list[Tensor]:
    tensor = make(numel, dtype)
    dist.reduce(tensor, 1)
    return [tensor]  # of the others, unchanged


def broadcast(make: Values, numel: int, dtype: torch.dtype) -> list[Tensor]:
    tensor = make(numel, dtype)
    dist.broadcast(tensor, 1)
    return [tensor]


def gathered(make: Values, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """In lists, of sizes that differ from rank to rank; and in one tensor."""
    size, rank = dist.get_world_size(), dist.get_rank()
    outputs = [make(numel + other, dtype) for other in range(size)]
    dist.all_gather(outputs, make(numel + rank, dtype))
    whole = make(numel * size, dtype)
    dist.all_gather_into_tensor(whole, make(numel, dtype))
    on_root = [make(numel, dtype) for _ in range(size)] if rank == 0 else None
    dist.gather(make(numel, dtype), on_root, 0)
    return [*outputs, whole, *(on_root or [])]


def scattered(make: Values, numel: int, dtype: torch.dtype) -> list[Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    output = make(numel, dtype)
    dist.scatter(output, list(make(numel * size, dtype).chunk(size)) if rank == 1 else None, 1)
    folded = make(numel, dtype)
    dist.reduce_scatter_tensor(folded, make(numel * size, dtype))
    return [output, folded]


def exchanged(make: Values, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Equal parts, and parts of which one is empty."""
    size, rank = dist.get_world_size(), dist.get_rank()
    equal = make(numel * size, dtype)
    dist.all_to_all_single(equal, make(numel * size, dtype))
    sent = [numel * (rank + other) for other in range(size)]
    output = make(sum(sent), dtype)
    dist.all_to_all_single(output, make(sum(sent), dtype), sent, sent)
    return [equal, output]


def messages(make: Values, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Around a ring, both ways at once, and from anybody."""
    size, rank = dist.get_world_size(), dist.get_rank()
    left, right = make(numel, dtype), make(numel, dtype)
    operations = [
        dist.P2POp(dist.isend, make(numel, dtype), (rank + 1) % size),
        dist.P2POp(dist.irecv, left, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if rank == 0:
        dist.recv(right, tag=1)  # a rank that is ahead may have sent its next round's message already
    elif rank == 1:
        dist.send(make(numel, dtype), 0, tag=1)
    return [left, right]


COLLECTIVES = [all_reduced, maximum, reduced, broadcast, gathered, scattered, exchanged, messages]


def compare_all(names: list[str], numels: list[int], dtype: torch.dtype, is_through_host: bool) -> None:
    """Results on the GPU equal those in the host's memory; large ones came through the GPU's where they could."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert isinstance(group, TorshProcessGroup)
    wire = group._gpu(torch.empty(0, device="cuda"))
    wire._is_asked = is_through_host
    for numel in numels:
        for run in (one for one in COLLECTIVES if one.__name__ in names):
            expected = run(lambda count, kind: values(count, kind, rank), numel, dtype)
            found = run(lambda count, kind: values(count, kind, rank).cuda(), numel, dtype)
            assert all(one.is_cuda for one in found)
            for mine, right in zip(found, expected, strict=True):
                assert torch.equal(mine.cpu(), right), (run.__name__, numel)
        assert (wire._memory is None) == (is_through_host or numel <= SMALL)


NAMES = [one.__name__ for one in COLLECTIVES]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_results_are_those_of_the_hosts_memory(world: World, num_ranks: int) -> None:
    arguments = (NAMES, [0, SMALL, LARGE], torch.float32, False)
    world.run(compare_all, *arguments, num_ranks=num_ranks, backend="torsh", timeout_s=100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.float64], ids=str)
def test_other_dtypes_are_folded_too(world: World, dtype: torch.dtype) -> None:
    world.run(compare_all, ["all_reduced", "scattered"], [700_001], dtype, False, num_ranks=2, backend="torsh")


def test_where_memory_cannot_be_shared_it_goes_through_the_host(world: World) -> None:
    world.run(compare_all, NAMES, [LARGE], torch.float32, True, num_ranks=2, backend="torsh", timeout_s=100)


def results_of_streams() -> list[float]:
    """Inputs that are still being computed, outputs that are used at once, on streams of one's own."""
    rank, found = dist.get_rank(), []
    for numel in (SMALL, LARGE):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tensor, busy = torch.zeros(numel, device="cuda"), torch.randn(4000, 4000, device="cuda")
            for _ in range(50):
                busy @ busy
            tensor.fill_(rank + 1)  # long after the host has gone on
            works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        found += [float(tensor.amin()), float(tensor.amax())]
        future = dist.all_reduce(tensor, async_op=True).get_future()
        [output] = future.wait()
        found += [float(output.amin()), float(output.amax())]
    return found


def test_calls_wait_for_the_callers_stream(world: World) -> None:
    assert world.run(results_of_streams, num_ranks=2, backend="torsh") == [[12.0, 12.0, 24.0, 24.0] * 2] * 2


def gradients(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 1000), nn.Tanh(), nn.Linear(1000, 10)).to(device)
    wrapped = nn.parallel.DistributedDataParallel(model)
    inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(1))[dist.get_rank() :: dist.get_world_size()]
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(inputs.to(device)).square().mean().backward()
    return [param.grad.cpu() for param in model.parameters() if param.grad is not None]


def test_torchs_ddp_averages_gradients(world: World) -> None:
    [alone] = world.run(gradients, "cpu", num_ranks=1)
    for found in world.run(gradients, "cuda", num_ranks=2, backend="torsh"):
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-6)


def released_by_abort() -> str:
    tensor = torch.ones(LARGE, device="cuda")
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        return "not called"
    work = dist.all_reduce(tensor, async_op=True)  # the other does not come
    abort("enough")
    try:
        work.wait()
    except CommunicationError as error:
        return str(error).splitlines()[0]
    return "no error"


def test_an_abort_releases_who_waits(world: World) -> None:
    waited, other = world.run(released_by_abort, num_ranks=2, backend="torsh")
    assert "enough" in waited
    assert other == "not called"


def error_of_survivor() -> str:
    tensor = torch.ones(LARGE, device="cuda")
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        os._exit(7)
    try:
        dist.all_reduce(tensor)
    except TorshError as error:
        return f"{type(error).__name__} {error.context}"
    return "no error"


def test_who_survives_is_told_who_died(world: World) -> None:
    outcomes: Any = world.outcomes(error_of_survivor, num_ranks=2, backend="torsh")
    assert outcomes[1].exit_code == 7
    assert "failed_rank': 1" in outcomes[0].value or "missing_ranks': [1]" in outcomes[0].value


def refused() -> str:
    try:
        dist.all_gather_into_tensor(torch.empty(4, device="cuda"), torch.ones(2))
    except TensorShapeMismatch as error:
        return error.message
    return "no error"


def test_tensors_of_two_devices_are_refused(world: World) -> None:
    assert world.run(refused, num_ranks=2, backend="torsh") == ["the tensors of one call must have the same device"] * 2
