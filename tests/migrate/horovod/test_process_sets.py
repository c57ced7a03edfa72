"""Sets of some ranks: registered at the start or while training, used by their members only."""

from __future__ import annotations

import pytest
import torch

import torsh_distributed.migrate.horovod as hvd
from tests.bed.world import World


def fixed_sets() -> None:
    even, odd = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1])
    assert even.size() is None
    with pytest.raises(ValueError, match="same ranks"):
        hvd.init(process_sets=[even, hvd.ProcessSet([0, 2])])
    hvd.init(process_sets=[even, odd])
    me = hvd.rank()
    assert (even.process_set_id, odd.process_set_id, even.ranks) == (1, 2, [0, 2])
    assert (even.size(), even.included(), even.rank()) == (2, me != 1, {0: 0, 1: None, 2: 1}[me])
    mine = odd if me == 1 else even
    got = hvd.allreduce(torch.tensor([me + 1.0]), op=hvd.Sum, process_set=mine)
    assert got.item() == (2.0 if me == 1 else 4.0)
    if me != 1:
        assert hvd.broadcast(torch.tensor([me]), root_rank=2, process_set=even).item() == 2
        with pytest.raises(ValueError, match="not in the process set"):
            hvd.broadcast(torch.tensor([me]), root_rank=1, process_set=even)
        assert hvd.allgather_object(me, process_set=even) == [0, 2]
        with pytest.raises(NotImplementedError, match="global process set"):
            hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=even)
    else:
        with pytest.raises(ValueError, match="rank 1 is not in"):
            hvd.allreduce(torch.ones(1), process_set=even)
    hvd.barrier(process_set=mine)
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0, 1, 2], 1: [0, 2], 2: [1]}
    hvd.shutdown()
    assert even.size() is None


def dynamic_sets() -> None:
    hvd.init(process_sets="dynamic")
    me = hvd.rank()
    pair = hvd.add_process_set([0, 1])
    assert pair.process_set_id == 1
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set([1, 0])
    if me < 2:
        assert hvd.allreduce(torch.tensor([me + 1.0]), process_set=pair).item() == 1.5
    with pytest.raises(hvd.HorovodInternalError, match="mismatched ranks"):
        hvd.add_process_set([me, 2] if me < 2 else [0, 2])
    assert hvd.remove_process_set(pair)
    assert pair.process_set_id is None
    assert not hvd.remove_process_set(pair)
    assert not hvd.remove_process_set(hvd.global_process_set)
    again = hvd.add_process_set(hvd.ProcessSet([1, 2]))
    assert again.process_set_id == 2
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
    hvd.shutdown()


def both() -> None:
    fixed_sets()
    dynamic_sets()


def some_ranks() -> list[int]:
    """A job of which two ranks take part, in an order of their own."""
    if int(__import__("os").environ["RANK"]) == 1:
        return []
    hvd.init(comm=[2, 0])
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
    first = hvd.broadcast_object(hvd.rank(), root_rank=1)
    hvd.shutdown()
    return [hvd.is_initialized(), total, first]


def test_sets_are_registered_used_and_forgotten(world: World) -> None:
    world.run(both, num_ranks=3, backend=None)
    assert world.run(some_ranks, num_ranks=3, backend="gloo") == [[False, 3.0, 1], [], [False, 3.0, 1]]
