"""The torsh backend with MPI between nodes: every operation, groups of some ranks, and an abort."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.comm.backends.hierarchical.test_wire import stop
from tests.comm.backends.mpi.world import MpiWorld, join_mpi_job
from tests.comm.collectives.test_moves import move_everything
from tests.comm.collectives.test_objects import pass_values_around
from tests.comm.collectives.test_point_to_point import send_in_a_ring
from tests.comm.collectives.test_reductions import reduce_everything
from tests.comm.collectives.test_work import run_asynchronously
from torsh_distributed.comm.backends import announce_backends
from torsh_distributed.comm.backends.hierarchical import TorshOptions
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.comm.meeting.network_interface import LEG_VARIABLE
from torsh_distributed.errors import CommunicationError, ConfigurationError, TorshError


def start(nodes: str, address: str, folder: Path) -> None:
    """A world whose rank r lives on node nodes[r], one MPI job."""
    join_mpi_job(address)
    announce_backends()
    rank, size = int(os.environ["RANK"]), len(nodes)
    dist.init_process_group(
        "torsh",
        store=dist.FileStore(str(folder / "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
        pg_options=TorshOptions(node=nodes[rank], between="mpi"),
    )


def everything(nodes: str, address: str, folder: Path) -> None:
    start(nodes, address, folder)
    rank, size = dist.get_rank(), len(nodes)
    reduce_everything()
    move_everything()
    pass_values_around()
    run_asynchronously()
    send_in_a_ring()
    for numel in (8193, 3 * 2**20 + 1):  # one piece, and several in flight
        values = torch.arange(numel, dtype=torch.float64) % 97 + rank
        dist.all_reduce(values)
        assert torch.equal(values, (torch.arange(numel, dtype=torch.float64) % 97) * size + sum(range(size)))
    options = TorshOptions(node=nodes[rank], between="mpi")
    for members in ([0, size - 1], [1, size - 1, 0]):
        group = dist.new_group(members, pg_options=options)
        if rank in members:
            value = torch.tensor(10**rank)
            dist.all_reduce(value, group=group)
            assert int(value) == sum(10**member for member in members)
    stop()


@pytest.mark.needs_mpi
@pytest.mark.parametrize("nodes", ["aabb", pytest.param("abca", marks=pytest.mark.matrix)])
def test_every_operation_gives_what_it_must(mpi_world: MpiWorld, world: World, nodes: str) -> None:
    with mpi_world.job(len(nodes)) as (address, folder):
        world.run(everything, nodes, address, folder, num_ranks=len(nodes), backend=None, timeout_s=90)


def released(address: str, folder: Path) -> str:
    """Rank 1 never comes; the other aborts and is released."""
    start("ab", address, folder)
    if dist.get_rank() == 1:
        dist.distributed_c10d._get_default_store().get("released")
        return ""
    timer = threading.Timer(0.3, abort, args=["rank 1 is lost"])
    timer.start()
    with pytest.raises(TorshError):
        all_reduce(torch.ones(100_000))
    timer.join()
    dist.distributed_c10d._get_default_store().set("released", "")
    with pytest.raises(CommunicationError) as raised:
        all_reduce(torch.ones(1))
    return str(raised.value)


@pytest.mark.needs_mpi
@pytest.mark.matrix
def test_an_abort_releases_who_waits_for_another_node(mpi_world: MpiWorld, world: World) -> None:
    with mpi_world.job(2) as (address, folder):
        said, _ = world.run(released, address, folder, num_ranks=2, backend=None, timeout_s=60)
    assert "the group was aborted: rank 1 is lost" in said


def disagree(folder: Path) -> str:
    announce_backends()
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(folder / "store"), 2)
    os.environ[LEG_VARIABLE] = "mpi" if rank else "gloo"
    with pytest.raises(ConfigurationError) as raised:
        dist.init_process_group("torsh", store=store, rank=rank, world_size=2, pg_options=TorshOptions(node=str(rank)))
    return str(raised.value)


@pytest.mark.matrix
def test_ranks_that_disagree_all_say_so(world: World, tmp_path: Path) -> None:
    for said in world.run(disagree, tmp_path, num_ranks=2, backend=None):
        assert "gloo on ranks [0], mpi on ranks [1]" in said
