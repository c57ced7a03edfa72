"""Tensors beyond 2 GiB, where a size in 32 bits would wrap: every byte arrives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World

NUMEL = 2**31 + 24
MARKED = (0, 2**31 - 1, 2**31, NUMEL - 1)
"""Places on both sides of what 32 bits can count."""


def exchange() -> list[str]:
    """Checks in place: two tensors of a rank at a time would take 8 GiB of memory."""
    rank, wrong = dist.get_rank(), list[str]()

    def check(what: str, everywhere: int, marked: int) -> None:
        found = [int(tensor[at]) for at in MARKED]
        if found != [marked] * len(MARKED):
            wrong.append(f"{what}: {found} at the marks, not {marked}")
        tensor[list(MARKED)] = everywhere
        least, most = int(tensor.min()), int(tensor.max())
        if (least, most) != (everywhere, everywhere):
            wrong.append(f"{what}: from {least} to {most}, not {everywhere}")

    tensor = torch.full((NUMEL,), rank + 1, dtype=torch.uint8)
    tensor[list(MARKED)] = 10 * (rank + 1)
    dist.all_reduce(tensor)
    check("all_reduce", 3, 30)
    if rank == 0:
        tensor.fill_(5)
        tensor[list(MARKED)] = 50
    dist.broadcast(tensor, 0)
    check("broadcast", 5, 50)
    if rank == 0:
        tensor[list(MARKED)] = 70
        dist.send(tensor, 1)
    else:
        tensor.zero_()
        dist.recv(tensor, 0)
        check("message", 5, 70)
    return wrong


@pytest.mark.matrix
@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["shm", "torsh"])
def test_sizes_beyond_32_bits(world: World, backend: str) -> None:
    assert world.run(exchange, backend=backend, timeout_s=110) == [[], []]
