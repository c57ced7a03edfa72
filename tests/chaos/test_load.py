"""Operations under load: many at a time, many in a row, many ranks, much memory. No error, every result right, and
afterwards no more files, threads, segments or memory than before. The long forms are in `make matrix`."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bed.world import World
from tests.comm.backends.ranks import all_gather_single, reduce_scatter_single
from torsh_distributed.comm.backends import announce_backends
from torsh_distributed.parallel.data.ddp import DistributedDataParallel
from torsh_distributed.plan import CompressConfig

pytestmark = pytest.mark.ranks

KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "message")
MOST_GROWTH_BYTES = 64 * 2**20
FROM_THE_FIRST_WAIT = Counter({"torsh-shm-messages": 1})
"""A thread that a group starts with the first message that has to wait, once."""


class Holdings(NamedTuple):
    """What a process holds of the system."""

    num_files: int
    threads: Counter[str]
    num_segments: int
    resident_bytes: int


def holdings() -> Holdings:
    """After the allocator has given back what it only keeps for later: its heaps grow with the order of the buffers."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    maps = Path("/proc/self/maps").read_text()
    return Holdings(
        len(list(Path("/proc/self/fd").iterdir())),
        Counter(thread.name for thread in threading.enumerate()),
        maps.count("torsh-shm"),
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


def assert_nothing_stays(before: Holdings, after: Holdings) -> None:
    """Fewer may be: slow ranks open connections at the start and give up those that came twice."""
    assert after.num_files <= before.num_files
    assert after.num_segments <= before.num_segments
    assert after.threads - before.threads <= FROM_THE_FIRST_WAIT
    assert after.resident_bytes - before.resident_bytes < MOST_GROWTH_BYTES


class Started(NamedTuple):
    """An operation under way, and what its result must be."""

    works: Sequence[dist.Work | None]
    result: Tensor
    expected: Tensor


def start(kind: str, numel: int, seed: int) -> Started:
    """Start one operation on values that follow from rank and seed; exact in float32."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((numel,), float(rank + seed))
    total = torch.full((numel,), float(size * seed + size * (size - 1) // 2))
    of_all = (torch.arange(size, dtype=torch.float32) + seed).repeat_interleave(numel)
    if kind == "all_reduce":
        return Started([dist.all_reduce(mine, async_op=True)], mine, total)
    if kind == "broadcast":
        root = seed % size
        return Started([dist.broadcast(mine, root, async_op=True)], mine, torch.full((numel,), float(root + seed)))
    if kind == "message":
        source, out = (rank - 1) % size, torch.empty(numel)
        works = [dist.isend(mine, (rank + 1) % size, tag=seed), dist.irecv(out, source, tag=seed)]
        return Started(works, out, torch.full((numel,), float(source + seed)))
    if kind == "all_gather":
        out = torch.empty(size * numel)
        return Started([all_gather_single(out, mine, async_op=True)], out, of_all)
    whole = mine.repeat(size)
    if kind == "reduce_scatter":
        out = torch.empty(numel)
        return Started([reduce_scatter_single(out, whole, async_op=True)], out, total)
    out = torch.empty(size * numel)
    return Started([dist.all_to_all_single(out, whole, async_op=True)], out, of_all)


def one_round(number: int, numel: int, num_operations: int, kinds: Sequence[str]) -> None:
    """Start that many operations of all kinds at once, then wait for every one and check it."""
    seeds = range(number * num_operations, (number + 1) * num_operations)
    under_way = [start(kinds[seed % len(kinds)], numel, seed) for seed in seeds]
    for works, result, expected in under_way:
        for work in works:
            assert work is not None
            work.wait()
        assert torch.equal(result, expected)


def many_at_once(
    numel: int, num_operations: int, num_rounds: int, seconds: float, kinds: Sequence[str]
) -> tuple[Holdings, Holdings]:
    """At least so many rounds, and for so long; all ranks agree when it is enough."""
    one_round(0, numel, num_operations, kinds)
    one_round(1, numel, num_operations, kinds)
    dist.barrier()  # the slowest rank has all its connections too
    before, number, end = holdings(), 2, time.monotonic() + seconds
    is_over = torch.zeros(1)
    while not is_over:
        one_round(number, numel, num_operations, kinds)
        number += 1
        is_over.fill_(number >= num_rounds + 2 and time.monotonic() >= end)
        dist.all_reduce(is_over, dist.ReduceOp.MIN)
    return before, holdings()


BACKENDS = ("shm", "gloo")
CONCURRENT = {
    "a hundred of all kinds": (3, 1_000, 100, 2, 0.0, KINDS),
    "a hundred of all kinds for 30 s": (3, 20_000, 100, 1, 30.0, KINDS),
    "16 ranks, a million elements": (16, 62_500, 12, 3, 0.0, KINDS),
    "messages that fill the link": (2, 2**20, 100, 5, 0.0, ("message",)),
    "a gigabyte under way": (2, 16 * 2**20, 8, 3, 0.0, ("all_reduce",)),
}
"""(ranks, elements, operations at once, rounds, seconds, kinds)"""
IN_SHORT = "a hundred of all kinds"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == IN_SHORT else pytest.mark.matrix) for name in CONCURRENT]
)
def test_many_operations_at_once_are_all_right_and_leave_nothing(world: World, backend: str, name: str) -> None:
    num_ranks, *load = CONCURRENT[name]
    for before, after in world.run(many_at_once, *load, num_ranks=num_ranks, backend=backend, timeout_s=300):
        assert_nothing_stays(before, after)


def train_compressed(method: str, num_steps: int) -> tuple[list[float], Holdings, Holdings]:
    """The weights at the end, and what the process held after a few steps and after all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))
    compression = CompressConfig(method=method, warmup_steps=0, skip_below_numel=0)
    replica = DistributedDataParallel(model, compression=compression)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    batch, labels = torch.randn(64, 256), torch.randint(8, (64,))
    before = holdings()
    for step in range(num_steps):
        nn.functional.cross_entropy(replica(batch), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 30:
            before = holdings()
    sums = [float(param.detach().double().sum()) for param in model.parameters()]
    return sums, before, holdings()


@pytest.mark.parametrize(
    ("backend", "method", "num_steps"),
    [
        ("shm", "int8", 60),
        *(
            pytest.param(backend, method, 1_000, marks=pytest.mark.matrix)
            for backend in BACKENDS
            for method in ("int8", "topk:0.01")
        ),
    ],
)
def test_compressed_training_goes_on_and_on_and_leaves_nothing(
    world: World, backend: str, method: str, num_steps: int
) -> None:
    found = world.run(train_compressed, method, num_steps, backend=backend, timeout_s=300)
    assert found[0][0] == found[1][0]
    for _, before, after in found:
        assert_nothing_stays(before, after)


SIZES = (4, 2, 3, 4, 3, 2)


def change_size(folder: Path, backend: str, sizes: Sequence[int]) -> tuple[Holdings, Holdings]:
    """Join worlds of those sizes in turn, each of the first ranks; `before` is when every size has come once."""
    announce_backends()
    rank, before = int(os.environ["RANK"]), holdings()
    for number, size in enumerate(sizes):
        if number == len(SIZES):
            before = holdings()
        if rank >= size:
            continue
        store = dist.FileStore(str(folder / str(number)), size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        try:
            one_round(number, 1_000, len(KINDS), KINDS)
        finally:
            dist.destroy_process_group()
    return before, holdings()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_changes", [12, pytest.param(60, marks=pytest.mark.matrix)])
def test_worlds_that_change_their_size_leave_nothing(
    world: World, tmp_path: Path, backend: str, num_changes: int
) -> None:
    sizes = [SIZES[number % len(SIZES)] for number in range(num_changes)]
    for before, after in world.run(change_size, tmp_path, backend, sizes, num_ranks=4, backend=None):
        assert_nothing_stays(before, after)
