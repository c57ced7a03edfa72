"""`horovod.run`: a function on several ranks, and its results."""

from __future__ import annotations

import pytest
import torch

import torsh_distributed.migrate.horovod as hvd
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument

pytestmark = pytest.mark.ranks


def add_ranks(start: int, *, factor: float = 1.0) -> float:
    import horovod.torch as name_of_old

    name_of_old.init()
    total = name_of_old.allreduce(torch.tensor([start + name_of_old.rank()]) * factor, op=name_of_old.Sum)
    if start < 0:
        raise ValueError("negative")
    return float(total)


@pytest.mark.matrix
def test_results_come_by_rank() -> None:
    assert hvd.run(add_ranks, (10,), {"factor": 2.0}, num_proc=2, use_gloo=True) == [42.0, 42.0]


@pytest.mark.matrix
def test_a_failure_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="exited with non-zero status"):
        hvd.run(add_ranks, (-1,), np=1)


def test_what_cannot_be_done_is_refused_by_name() -> None:
    with pytest.raises(FeatureNotAvailable, match=r"ssh_port"):
        hvd.run(add_ranks, ssh_port=22)
    with pytest.raises(FeatureNotAvailable, match="use_mpi"):
        hvd.run(add_ranks, use_mpi=True)
    with pytest.raises(FeatureNotAvailable, match="this machine only"):
        hvd.run(add_ranks, hosts="node7:2")
    with pytest.raises(InvalidArgument, match="slots"):
        hvd.run(add_ranks, hosts="localhost:2", num_proc=3)
    with pytest.raises(InvalidArgument, match="min_num_proc"):
        hvd.run(add_ranks, num_proc=1, min_num_proc=2)
