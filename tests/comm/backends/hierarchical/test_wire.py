"""The torsh backend over several nodes, even and uneven, against references computed locally."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.chaos.faults import mark, wait_for_mark
from tests.comm.collectives.test_moves import move_everything
from tests.comm.collectives.test_objects import pass_values_around
from tests.comm.collectives.test_point_to_point import send_in_a_ring
from tests.comm.collectives.test_reductions import reduce_everything
from tests.comm.collectives.test_work import run_asynchronously
from torsh_distributed.comm.backends.hierarchical import TorshOptions
from torsh_distributed.comm.backends.hierarchical.nodes import NodeLayout
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.errors import CommunicationError, FeatureNotAvailable, TorshError
from torsh_distributed.parallel.sharded.communication import gather, reduce_scatter


def start(nodes: str) -> None:
    """A world whose rank r lives on node nodes[r]."""
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0)
    options = TorshOptions(node=nodes[rank])
    dist.init_process_group("torsh", store=store, rank=rank, world_size=len(nodes), pg_options=options)


def stop() -> None:
    dist.barrier()
    dist.destroy_process_group()


def everything(nodes: str) -> None:
    start(nodes)
    reduce_everything()
    move_everything()
    pass_values_around()
    run_asynchronously()
    send_in_a_ring()
    stop()


@pytest.mark.parametrize(
    "nodes", ["aab", "abca", *(pytest.param(nodes, marks=pytest.mark.matrix) for nodes in ("ab", "abab", "abbb"))]
)
def test_every_operation_gives_what_it_must(world: World, nodes: str) -> None:
    world.run(everything, nodes, num_ranks=len(nodes), backend=None, timeout_s=60)


def reduce_sizes(nodes: str) -> None:
    """Around the borders: leader or shards, one piece or several, sizes that divide and that do not."""
    start(nodes)
    size, rank = len(nodes), dist.get_rank()
    for numel in (0, 1, 2, 3, 8191, 8192, 8193, 2**20 - 1, 2**20 + 5, 3 * 2**20 + 1):
        values = torch.arange(numel, dtype=torch.float64) % 97 + rank
        expected = (torch.arange(numel, dtype=torch.float64) % 97) * size + sum(range(size))
        dist.all_reduce(values)
        assert torch.equal(values, expected), numel
    mean = torch.full((9000,), float(rank))
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.unique().tolist() == [sum(range(size)) / size]
    stop()


@pytest.mark.parametrize("nodes", ["aabb", "abbb"])
def test_large_and_small_buffers_are_folded_alike(world: World, nodes: str) -> None:
    world.run(reduce_sizes, nodes, num_ranks=len(nodes), backend=None, timeout_s=60)


def onto_leaves(nodes: str) -> list[list[float]]:
    """Collectives on tensors that autograd tracks: they are moved as they are, as on gloo."""
    start(nodes)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    reduced, gathered, exchanged = (torch.zeros(size, requires_grad=True) for size in (1, num_ranks, num_ranks))
    source = torch.full((num_ranks,), float(rank + 1), requires_grad=True)
    reduce_scatter(reduced, source)
    gather(gathered, source[:1])
    dist.all_to_all_single(exchanged, source)
    stop()
    return [tensor.tolist() for tensor in (reduced, gathered, exchanged)]


@pytest.mark.parametrize("nodes", ["aab", "aaa"])
def test_tensors_that_autograd_tracks_are_moved_as_they_are(world: World, nodes: str) -> None:
    for results in world.run(onto_leaves, nodes, num_ranks=3, backend=None):
        assert results == [[6.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]


def sub_groups(nodes: str) -> list[int]:
    start(nodes)
    options = TorshOptions(node=nodes[dist.get_rank()])
    sums = []
    for members in ([0, 1], [1, 2, 3], [0, 2]):
        group = dist.new_group(members, pg_options=options)
        if dist.get_rank() in members:
            value = torch.tensor(10 ** dist.get_rank())
            dist.all_reduce(value, group=group)
            sums.append(int(value))
    stop()
    return sums


def test_sub_groups_may_span_nodes_or_not(world: World) -> None:
    results = world.run(sub_groups, "aabb", num_ranks=4, backend=None)
    assert results == [[11, 101], [11, 1110], [1110, 101], [1110]]


def from_anyone() -> None:
    start("ab")
    try:
        dist.recv(torch.zeros(1))
    finally:
        stop()


def test_a_receive_from_anyone_across_nodes_is_refused_in_words(world: World) -> None:
    with pytest.raises(FeatureNotAvailable, match="name the sender"):
        world.run(from_anyone, num_ranks=2, backend=None)


def release(folder: Path) -> None:
    """Rank 3 never comes; the others abort and are released, whether blocked on memory or on the network.

    Rank 3 stays until they are: its leaving would release them too.
    """
    start("aabb")
    if dist.get_rank() == 3:
        for other in range(3):
            wait_for_mark(folder, rank=other, step=1, within_s=15)  # the deadline of the call is later
        return
    timer = threading.Timer(0.5, abort, args=["rank 3 is lost"])
    timer.start()
    with pytest.raises(TorshError):
        all_reduce(torch.ones(100_000))
    mark(folder, step=1)
    timer.join()
    with pytest.raises(CommunicationError, match="the group was aborted: rank 3 is lost"):
        all_reduce(torch.ones(1))


def test_abort_releases_ranks_on_both_levels(world: World, tmp_path: Path) -> None:
    world.run(release, tmp_path, num_ranks=4, backend=None)


def test_shards_are_as_many_as_the_smallest_node_has_ranks() -> None:
    layout = NodeLayout(((0, 3, 4), (1, 2)), rank=4)
    assert (layout.node_index, layout.position, layout.num_shards) == (0, 2, 2)
    assert layout.node_of(2) == 1
