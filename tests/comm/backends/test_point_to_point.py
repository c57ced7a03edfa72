"""Sends and receives: tags, order, any source, sizes beyond the ring, and progress while nobody waits."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.comm.backends.ranks import ALL_DTYPES, CORES, barrier_within, data, on_shm
from torsh_distributed.errors import CommunicationError, OperationTimeout, TensorShapeMismatch

LARGE = 1_000_000  # elements of 4 bytes: 16 times the ring


def ring_of_neighbours() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in (0, 1, 1000, LARGE):
        for dtype in ALL_DTYPES if numel == 1000 else (torch.float32,):
            mine, got = data((numel,), dtype, rank), torch.empty(numel, dtype=dtype)
            requests = [dist.isend(mine, (rank + 1) % size), dist.irecv(got, (rank - 1) % size)]
            for request in requests:
                assert request is not None
                request.wait()
            assert got.tolist() == data((numel,), dtype, (rank - 1) % size).tolist()


def everybody_sends_first() -> None:
    """Large messages both ways, posted before any receive: nobody may wait for the other to receive."""
    rank, size = dist.get_rank(), dist.get_world_size()
    got = [torch.empty(LARGE) for _ in range(size)]
    operations = [dist.P2POp(dist.isend, torch.full((LARGE,), float(rank)), peer) for peer in range(size)]
    operations += [dist.P2POp(dist.irecv, got[peer], peer) for peer in range(size)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    assert [part[-1].item() for part in got] == [float(peer) for peer in range(size)]


def tags_out_of_order() -> None:
    rank = dist.get_rank()
    if rank == 0:
        requests = [dist.isend(torch.full((5 * LARGE // 4,), float(tag)), 1, tag=tag) for tag in range(5)]
        for request in requests:
            assert request is not None
            request.wait()
    if rank == 1:
        for tag in (3, 1, 4, 0, 2):
            got = torch.empty(5 * LARGE // 4)
            dist.recv(got, 0, tag=tag)
            assert got.eq(tag).all()


def same_tag_in_order() -> None:
    rank = dist.get_rank()
    if rank == 0:
        for number in range(200):
            dist.send(torch.full((number,), float(number)), 1)
    if rank == 1:
        for number in range(200):
            got = torch.empty(number)
            dist.recv(got, 0)
            assert got.eq(number).all()


def from_anyone() -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        dist.send(torch.tensor([float(rank)]), 0, tag=7)
        return []
    sources = []
    for _ in range(size - 1):
        got = torch.empty(1)
        source = dist.recv(got, tag=7)
        assert got.item() == source
        sources.append(source)
    return sources


def random_traffic() -> None:
    """The same random plan on every rank: many messages between random pairs, receives in a shuffled order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    source = random.Random(size)
    plan = [
        (source.randrange(size), source.randrange(size), source.randrange(4), source.choice([0, 3, 500, 100_000]))
        for _ in range(150)
    ]
    numbered = list(enumerate(plan))
    sends = [
        dist.isend(torch.full((numel,), float(number)), to, tag=tag)
        for number, (one, to, tag, numel) in numbered
        if one == rank
    ]
    # Of one sender and one tag messages come in order; between them the receiver may choose any order.
    streams: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, (one, to, tag, numel) in numbered:
        if to == rank:
            streams.setdefault((one, tag), []).append((number, numel))
    while streams:
        one, tag = source.choice(sorted(streams))
        number, numel = streams[one, tag].pop(0)
        if not streams[one, tag]:
            del streams[one, tag]
        got = torch.empty(numel)
        dist.recv(got, one, tag=tag)
        assert got.eq(number).all(), (number, one, tag, numel)
    for request in sends:
        assert request is not None
        request.wait()
    dist.barrier()


def messages_flow_beside_a_collective() -> None:
    """Rank 0 is inside a collective while its large send is taken: progress must not need its waiting."""
    rank = dist.get_rank()
    request = dist.isend(torch.ones(LARGE), 1) if rank == 0 else None
    if rank == 1:
        got = torch.empty(LARGE)
        dist.recv(got, 0)
        assert got.eq(1).all()
    dist.barrier()
    if request is not None:
        request.wait()


def strided_buffers() -> None:
    rank = dist.get_rank()
    whole = torch.arange(20.0).reshape(4, 5)
    if rank == 0:
        dist.send(whole.t()[::2], 1)
    if rank == 1:
        got = torch.zeros(5, 4)
        dist.recv(got[::2], 0)
        torch.testing.assert_close(got[::2], whole.t()[::2], rtol=0, atol=0)
        assert got[1::2].eq(0).all()


def wrong_size() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
        dist.barrier()
    else:
        dist.recv(torch.ones(4), 0)


def nobody_sends() -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.ones(4), 0)
    else:
        barrier_within(20)


def wait_with_a_limit() -> None:
    if dist.get_rank() == 1:
        got = torch.empty(2)
        request = dist.irecv(got, 0)
        assert request is not None
        with pytest.raises(OperationTimeout, match=r"not done within the 0.1 s given to wait"):
            request.wait(timedelta(seconds=0.1))
        dist.barrier()
        request.wait()
        assert got.tolist() == [1.0, 1.0]
    else:
        dist.barrier()
        dist.send(torch.ones(2), 1)


def every_exchange() -> None:
    for case in (
        ring_of_neighbours,
        everybody_sends_first,
        tags_out_of_order,
        same_tag_in_order,
        random_traffic,
        messages_flow_beside_a_collective,
        strided_buffers,
    ):
        case()


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_messages_arrive(world: World, tmp_path: Path, core: str, num_ranks: int) -> None:
    world.run(on_shm, tmp_path, core, every_exchange, num_ranks=num_ranks, backend=None)


@pytest.mark.parametrize("core", CORES)
def test_a_rank_may_send_to_itself(world: World, tmp_path: Path, core: str) -> None:
    world.run(on_shm, tmp_path, core, ring_of_neighbours, num_ranks=1, backend=None)


@pytest.mark.parametrize("core", CORES)
def test_a_receive_from_anyone_says_from_whom(world: World, tmp_path: Path, core: str) -> None:
    sources = world.run(on_shm, tmp_path, core, from_anyone, num_ranks=4, backend=None)[0]
    assert sorted(sources) == [1, 2, 3]


@pytest.mark.parametrize("core", CORES)
def test_a_message_of_another_size_is_an_error_with_both_sizes(world: World, tmp_path: Path, core: str) -> None:
    outcomes = world.outcomes(on_shm, tmp_path, core, wrong_size, backend=None)
    assert isinstance(outcomes[1].error, TensorShapeMismatch)
    assert "rank 0 sent 12 bytes" in str(outcomes[1].error)
    assert isinstance(outcomes[0].error, CommunicationError)


@pytest.mark.parametrize("core", CORES)
def test_a_receive_nobody_serves_ends_at_the_deadline(world: World, tmp_path: Path, core: str) -> None:
    outcomes = world.outcomes(on_short_shm, tmp_path, core, nobody_sends, backend=None)
    assert isinstance(outcomes[1].error, OperationTimeout)
    assert outcomes[1].error.context["missing_ranks"] == [0]
    assert "recv number 1" in str(outcomes[1].error)
    assert isinstance(outcomes[0].error, CommunicationError), (
        "rank 0 is released, it does not wait for its own deadline"
    )


@pytest.mark.parametrize("core", CORES)
def test_a_limit_on_waiting_does_not_end_the_receive(world: World, tmp_path: Path, core: str) -> None:
    world.run(on_shm, tmp_path, core, wait_with_a_limit, backend=None)


def on_short_shm(folder: Path, core: str, function: object) -> object:
    return on_shm(folder, core, function, timeout_s=1.0)  # type: ignore[arg-type]  # a function
