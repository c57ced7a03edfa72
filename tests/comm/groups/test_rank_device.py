"""A rank computes on a GPU of its own; where there is not one for each, ranks share them or use the CPU, and say so."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torsh_distributed.comm.groups import rank_device as module
from torsh_distributed.comm.groups.rank_device import gpus_for_ranks, rank_device
from torsh_distributed.comm.meeting.rendezvous import Roster, join
from torsh_distributed.errors import InvalidArgument


@pytest.fixture(autouse=True)
def nothing_was_said() -> None:
    module._say_once.cache_clear()


def device(local_rank: int, num_local_ranks: int, num_gpus: int, **facts: Any) -> str:
    is_each = facts.get("has_gpu_each", num_local_ranks <= num_gpus)
    roster = Roster((0,) * num_local_ranks, has_gpu_each=is_each, has_gpus=facts.get("has_gpus", num_gpus > 0))
    backend = facts.get("backend", "torsh")
    return str(
        rank_device(local_rank, num_local_ranks=num_local_ranks, num_gpus=num_gpus, roster=roster, backend=backend)
    )


def test_without_a_gpu_it_is_the_cpu_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert device(0, 2, 0) == "cpu"
    assert not caplog.records


def test_with_enough_it_is_the_gpu_of_the_local_rank() -> None:
    assert [device(rank, 2, 2) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert device(0, 1, 8) == "cuda:0"


def test_with_too_few_they_are_shared_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="torsh_distributed"):
        assert [device(rank, 4, 2) for rank in (0, 1, 2, 3, 0)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    (record,) = caplog.records
    assert "ranks share GPUs: 4 ranks and 2 visible GPUs on this node" in record.getMessage()


@pytest.mark.parametrize("facts", [{"backend": "gloo"}, {"has_gpus": False}], ids=["gloo", "a node without"])
def test_where_they_cannot_be_shared_it_is_the_cpu_for_all(
    facts: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="torsh_distributed"):
        assert [device(rank, 2, 1, **facts) for rank in (0, 1, 0)] == ["cpu"] * 3
    (record,) = caplog.records
    assert "computing on the CPU: 2 ranks and 1 visible GPU on this node" in record.getMessage()


def test_another_nodes_lack_counts_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="torsh_distributed"):
        assert device(0, 2, 2, has_gpu_each=False, has_gpus=False) == "cpu"
    assert "another node has fewer visible GPUs than ranks" in caplog.text


def test_nccl_by_name_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="local rank 1 has no GPU of its own: 2 ranks and 1 visible GPU"):
        device(1, 2, 1, backend="nccl")


def test_a_launchers_count_of_ranks_is_one_too() -> None:
    found = torch.cuda.device_count()
    assert gpus_for_ranks(None) == gpus_for_ranks(found) == found
    assert gpus_for_ranks(found + 1) == 0


@pytest.mark.parametrize(("num_gpus", "expected"), [((2, 2, 1), True), ((1, 1, 1), False), ((2, 2, 0), False)])
def test_the_ranks_agree_on_whether_each_has_a_gpu(num_gpus: tuple[int, ...], expected: bool) -> None:
    """Ranks 0 and 1 on one node, rank 2 on another."""
    store, nodes = dist.HashStore(), ("a", "a", "b")

    def arrive(rank: int) -> bool:
        roster = join(store, rank=rank, world_size=3, timeout_s=30, node=nodes[rank], num_gpus=num_gpus[rank])
        return roster.has_gpu_each

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(arrive, range(3))) == [expected] * 3
