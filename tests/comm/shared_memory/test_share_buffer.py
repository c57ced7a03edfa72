"""Tensors that all ranks see where they lie: sums with the same bits, whoever comes with which tensor."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.world import World
from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.shm.core import load_native
from torsh_distributed.comm.shared_memory import buffers
from torsh_distributed.comm.shared_memory.buffers import share_buffer
from torsh_distributed.errors import ProcessFailure

pytestmark = pytest.mark.skipif(
    load_native() is None, reason="the core is not compiled: no C compiler was found at install"
)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def no_files(*_: object, **__: object) -> NoReturn:
    raise OSError(24, "Too many open files")


NUMEL = 40_003
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "mean": dist.ReduceOp.AVG}


def contribution(dtype: torch.dtype, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randint(-50, 50, (NUMEL,), generator=generator).to(dtype)


def reduce_shared() -> None:
    """Bit for bit what is found without sharing, in the tensor and in views of it that were there before."""
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.float64)):
        buffer = contribution(dtype, number)
        view = buffer[7:NUMEL]
        shared = share_buffer(buffer, _world())
        assert shared is not None
        assert torch.equal(buffer, contribution(dtype, number)), "moving it must not change it"
        for op in OPS.values() if dtype.is_floating_point else (OPS["sum"], OPS["max"]):
            for is_async in (False, True):
                mine = contribution(dtype, number + 10)
                buffer.copy_(mine)
                work = dist.all_reduce(buffer, op, async_op=is_async)
                if work is not None:
                    work.wait()
                dist.all_reduce(mine, op)
                assert torch.equal(buffer, mine)
                assert torch.equal(view, mine[7:])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("backend", ["shm", "torsh"])
def test_a_shared_tensor_is_reduced_where_it_lies_with_the_same_bits(
    world: World, backend: str, num_ranks: int
) -> None:
    world.run(reduce_shared, num_ranks=num_ranks, backend=backend)


class Watched:
    """A core that counts sums of shared tensors."""

    def __init__(self, core: Any) -> None:
        self.core, self.num_shared = core, 0

    def all_reduce_shared(self, *args: Any) -> Any:
        self.num_shared += 1
        return self.core.all_reduce_shared(*args)


def count_shared_sums() -> list[int]:
    """After a sum of the shared tensor, of a part of it, of another tensor, and once nothing holds it."""
    group = _world()
    assert isinstance(group, TorshProcessGroup)
    watched = group.wire._native = Watched(group.wire._native)  # type: ignore[attr-defined]
    buffer = contribution(torch.float32, 0)
    shared = share_buffer(buffer, group)
    assert shared is not None
    counts = []
    for tensor in (buffer, buffer[:-1], buffer.clone()):
        dist.all_reduce(tensor)
        counts.append(watched.num_shared)
    del shared
    gc.collect()
    dist.all_reduce(buffer)
    return [*counts, watched.num_shared]


def test_the_shared_tensor_alone_is_summed_in_place(world: World) -> None:
    assert world.run(count_shared_sums, backend="shm") == [[1, 1, 1, 1]] * 2


def write_to_the_other() -> bool:
    buffer = torch.full((NUMEL,), float(dist.get_rank()))
    shared = share_buffer(buffer, _world())
    assert shared is not None
    other = shared.memory[1 - dist.get_rank()]
    assert isinstance(other, Tensor)
    dist.barrier()
    other.view(torch.float32)[5] = 7.0
    dist.barrier()
    return buffer[5].item() == 7.0


def test_each_rank_sees_the_tensor_of_the_other(world: World) -> None:
    assert world.run(write_to_the_other, backend="shm") == [True, True]


def reduce_with_others_unshared() -> None:
    """A rank may come with a tensor that is not shared, of all ranks the same one, or after it let go of its own."""
    buffer = contribution(torch.float32, 0)
    shared = share_buffer(buffer, _world())
    assert shared is not None
    expected = contribution(torch.float32, 1)
    dist.all_reduce(expected)
    for stranger in (0, dist.get_world_size() - 1, None):
        mine = contribution(torch.float32, 1)
        if dist.get_rank() != stranger:
            buffer.copy_(mine)
            mine = buffer
        dist.all_reduce(mine)
        assert torch.equal(mine, expected)
    if dist.get_rank() == 1:
        del shared
        gc.collect()
    buffer.copy_(contribution(torch.float32, 1))
    dist.all_reduce(buffer)
    assert torch.equal(buffer, expected)


def test_ranks_need_not_all_come_with_what_they_share(world: World) -> None:
    world.run(reduce_with_others_unshared, num_ranks=3, backend="shm")


_share_fd = torch.UntypedStorage._share_fd_cpu_


def no_sharing_by_torch(storage: torch.UntypedStorage) -> object:
    """Large ones, that is: the look at how much room there is goes well."""
    if storage.nbytes() > 1000:
        raise RuntimeError("unable to open shared memory object: test")
    return _share_fd(storage)


def fail_to_share() -> list[tuple[bool, list[str]]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment]
    logger = logging.getLogger("torsh_distributed.comm.shared_memory.buffers")
    logger.addHandler(handler)
    found = []
    faults: list[tuple[object, str, Callable[..., object]]] = [
        (torch.UntypedStorage, "_share_fd_cpu_", no_sharing_by_torch),
        (buffers, "_mapped", no_files),
        (buffers, "_has_room", lambda _: False),
    ]
    for target, name, fails in faults:
        records.clear()
        buffer = contribution(torch.float32, 3)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(target, name, fails)
            is_none = share_buffer(buffer, _world()) is None
        found.append((is_none, [one.getMessage() for one in records if one.levelno >= logging.WARNING]))
        expected = contribution(torch.float32, 3)
        dist.all_reduce(expected)
        dist.all_reduce(buffer)
        assert torch.equal(buffer, expected)
    logger.removeHandler(handler)
    return found


def test_where_one_rank_cannot_share_none_does_and_sums_are_right(world: World) -> None:
    for found in world.run(fail_to_share, num_ranks=3, backend="shm"):
        assert [is_none for is_none, _ in found] == [True, True, True]
        assert "unable to open shared memory object: test" in found[0][1][0]
        assert "Too many open files" in found[1][1][0]
        assert found[2][1] == [], "containers with little room are common: nothing to worry about"


def share_on_gloo() -> bool:
    return share_buffer(torch.zeros(9), _world()) is None


def test_gloo_shares_no_tensors(world: World) -> None:
    assert world.run(share_on_gloo, backend="gloo") == [True, True]


def die_while_others_reduce() -> int:
    buffer = torch.ones(NUMEL)
    shared = share_buffer(buffer, _world())
    assert shared is not None
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ProcessFailure) as caught:
        dist.all_reduce(buffer)
    return int(caught.value.context["failed_rank"])


def test_a_rank_that_dies_is_named_by_those_who_wait(world: World) -> None:
    outcomes = world.outcomes(die_while_others_reduce, num_ranks=3, backend="shm")
    assert [outcomes[rank].value for rank in (0, 2)] == [1, 1]
