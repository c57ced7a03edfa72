"""The short way gives what the long one gives, and leaves to it what is not plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import torsh_distributed as td
from tests.bed.world import World
from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.errors import CommunicationError, InvalidArgument


class Named(torch.Tensor):
    """A tensor that is more than its values."""


def all_ways() -> dict[str, tuple[float, int]]:
    """By way: the sum's first value, and how many of the calls came through torch."""
    group = dist.group.WORLD
    assert isinstance(group, TorshProcessGroup)
    through_torch: list[object] = []
    allreduce = TorshProcessGroup.allreduce

    def noted(self: TorshProcessGroup, *args: Any) -> dist.Work:
        through_torch.append(args)
        return allreduce(self, *args)

    TorshProcessGroup.allreduce = noted  # type: ignore[method-assign]
    found = {}

    def note(name: str, tensor: torch.Tensor, **where: Any) -> None:
        before = len(through_torch)
        assert td.all_reduce(tensor, **where) is tensor
        found[name] = (float(tensor.detach().to_dense().flatten()[0]), len(through_torch) - before)

    note("first", torch.ones(8))
    note("short", torch.ones(8))
    note("in a group", torch.ones(8), group=group)
    note("with a deadline", torch.ones(8), timeout_s=20)
    note("parameter", torch.nn.Parameter(torch.ones(8)))
    note("strided", torch.ones(8, 2)[:, 0])
    note("subclass", torch.ones(8).as_subclass(Named))
    note("sparse", torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), check_invariants=True))
    pending = td.all_reduce(torch.ones(2**20), async_op=True)
    note("behind another", torch.ones(8))
    pending.wait()
    return found


@pytest.mark.parametrize("backend", ["shm", "torsh"])
def test_what_is_not_plain_goes_through_torch(world: World, backend: str) -> None:
    for found in world.run(all_ways, backend=backend):
        assert {value for value, _ in found.values()} == {2.0}
        assert found["short"][1] == found["in a group"][1] == found["parameter"][1] == 0
        for name in ("first", "with a deadline", "strided", "subclass", "sparse"):
            assert found[name][1] == 1, name


def records() -> list[tuple[int, bool, str | None]]:
    """The history after good calls, one with a wrong operation, and one on a group that was aborted."""
    for _ in range(3):
        td.all_reduce(torch.ones(8))
    with pytest.raises(InvalidArgument, match="median"):
        td.all_reduce(torch.ones(8), "median")
    td.barrier()
    td.abort("enough")
    with pytest.raises(CommunicationError, match="enough"):
        td.all_reduce(torch.ones(8))
    return [(one.sequence, one.end_s is not None, one.error) for one in td.comm.recorder]


@pytest.mark.parametrize("backend", ["shm", "torsh"])
def test_each_call_has_one_record_and_every_record_ends(world: World, backend: str) -> None:
    for kept in world.run(records, backend=backend):
        assert [sequence for sequence, _, error in kept if error is None] == [1, 2, 3, 4], (
            "a refused call has no number"
        )
        assert all(is_ended for _, is_ended, _ in kept)
        assert "enough" in (kept[-1][2] or "")
