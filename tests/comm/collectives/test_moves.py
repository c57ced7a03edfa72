"""Every move of values against what must arrive, computed locally from what every rank is known to hold."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.world import World
from tests.comm.collectives.test_reductions import held
from torsh_distributed.comm.collectives.moves import (
    all_gather,
    all_gather_single,
    all_to_all,
    all_to_all_single,
    broadcast,
    gather,
    scatter,
)
from torsh_distributed.errors import InvalidArgument, RankOutOfBounds, TensorShapeMismatch

SHORT = (("gloo", 1), ("gloo", 3), ("shm", 2), ("torsh", 4))


def move_everything() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    for shape in ((4, 3), (), (0, 2)):
        everyone = [held(rank, shape, torch.float32) for rank in range(size)]
        assert all(map(torch.equal, all_gather(everyone[me]), everyone))
        if shape:
            assert torch.equal(all_gather_single(everyone[me]), torch.cat(everyone))
        for root in {0, size - 1}:
            assert torch.equal(broadcast(everyone[me].clone(), root), everyone[root])
            gathered = gather(everyone[me], root)
            assert (gathered is None) == (me != root)
            assert gathered is None or all(map(torch.equal, gathered, everyone))
            given = [part * 2 for part in everyone] if me == root else None
            assert torch.equal(scatter(torch.empty(shape), root, given), everyone[me] * 2)
    even = held(me, (size, 2), torch.int32)
    expected = torch.stack([held(rank, (size, 2), torch.int32)[me] for rank in range(size)])
    assert torch.equal(all_to_all_single(even), expected)
    # Rank r sends (r + d) % 3 rows to rank d, all holding r * 10 + d.
    sent = [(me + dst) % 3 for dst in range(size)]
    taken = [(src + me) % 3 for src in range(size)]
    rows = torch.cat([torch.full((count,), me * 10 + dst) for dst, count in enumerate(sent)])
    expected = torch.cat([torch.full((count,), src * 10 + me) for src, count in enumerate(taken)])
    assert torch.equal(all_to_all_single(rows, sent, taken), expected)
    strided = held(me, (3, 4), torch.float32).t()
    assert torch.equal(all_gather(strided)[size - 1], held(size - 1, (3, 4), torch.float32).t())


@pytest.mark.parametrize(
    ("backend", "num_ranks"),
    [
        pytest.param(backend, num_ranks, marks=() if (backend, num_ranks) in SHORT else pytest.mark.matrix)
        for backend in ("gloo", "shm", "torsh")
        for num_ranks in (1, 2, 3, 4)
    ],
)
def test_every_move_gives_what_it_must(world: World, backend: str, num_ranks: int) -> None:
    world.run(move_everything, num_ranks=num_ranks, backend=backend, timeout_s=60)


def sent(src: int, dst: int) -> Tensor:
    """What a pair exchanges: another shape for every pair, among them a scalar, an empty one and a strided one."""
    shape = [(), (0, 3), (src + 1, dst + 2)][(src + 2 * dst) % 3]
    return torch.full(shape[::-1], src * 10.0 + dst).t() if len(shape) == 2 else torch.full(shape, src * 10.0 + dst)


def exchange_lists() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    given = [sent(me, dst) for dst in range(size)]
    expected = [sent(src, me) for src in range(size)]
    outputs = [torch.full_like(tensor, -1) for tensor in expected]
    filled = all_to_all(given, outputs)
    assert all(one is other for one, other in zip(filled, outputs, strict=True))
    for received in (filled, all_to_all(given), all_to_all(given, async_op=True).wait()):
        assert [tensor.shape for tensor in received] == [tensor.shape for tensor in expected]
        assert all(map(torch.equal, received, expected))


@pytest.mark.parametrize("backend", ["gloo", "shm", "torsh"])
def test_lists_are_exchanged_whatever_the_shapes(world: World, backend: str) -> None:
    world.run(exchange_lists, num_ranks=3, backend=backend)


def refused(case: str) -> str:
    pair = [torch.zeros(1), torch.zeros(1)]
    cases = {
        "root": lambda: broadcast(torch.zeros(2), 7),
        "splits": lambda: all_to_all_single(torch.zeros(3), [1, 1], [1, 1]),
        "one split": lambda: all_to_all_single(torch.zeros(4), [2, 2]),
        "parts": lambda: scatter(torch.zeros(1), 0, [torch.zeros(1)]),
        "a tensor for a list": lambda: all_to_all(torch.zeros(2)),  # type: ignore[call-overload]  # the mistake
        "outputs": lambda: all_to_all(pair, pair[:1]),
        "dims": lambda: all_to_all([torch.zeros((1,) * 9)] * 2),
        "rows of a scalar": lambda: all_gather_single(torch.tensor(1.0)),
    }
    try:
        cases[case]()
    except InvalidArgument as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("root", RankOutOfBounds, "src 7 is not a rank of the group"),
        ("splits", TensorShapeMismatch, "add up to 2 rows, but the tensor has 3"),
        ("one split", InvalidArgument, "both input_splits and output_splits"),
        ("parts", InvalidArgument, "one part for each rank"),
        ("a tensor for a list", InvalidArgument, "call all_to_all_single"),
        ("outputs", InvalidArgument, "one tensor for each rank"),
        ("dims", InvalidArgument, "at most 8 dims"),
        ("rows of a scalar", InvalidArgument, "use all_gather"),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(world: World, case: str, kind: type, message: str) -> None:
    for answer in world.run(refused, case):
        assert answer.startswith(kind.__name__)
        assert message in answer
