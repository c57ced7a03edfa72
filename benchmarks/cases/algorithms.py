"""How good `algorithm="auto"` is: its pick against every algorithm and the backend's own."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.comm.algorithms.registry import ALGORITHMS, AUTO
from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.groups.manager import twin_group

_BACKENDS = ("gloo", "shm")
_TIMEOUT_S = 600.0
# The kernel leaves the threads of ranks that share cores in place for a while, so an algorithm takes one of two times.
# A round averages many short blocks of each; the median of a few would be one of the two by chance.
_SMALL_BYTES, _NUM_SMALL_BLOCKS, _NUM_LARGE_BLOCKS, _MAX_LOOPS = 2**20, 160, 24, 15
_NUM_ROUNDS, _LEAST_IN_A_ROW = 40, 3
_CLOSE = 1.1
# All ranks of this case are on one node: a hierarchy would have nothing to separate.
_WAYS = (None, *(name for name in ALGORITHMS if name != "hierarchical"))


def _sample(way: str | None, buffer: torch.Tensor, group: dist.ProcessGroup, loops: int) -> float:
    """Seconds per all-reduce on this rank; all ranks start together."""
    dist.barrier(group)
    started_s = time.perf_counter()
    for _ in range(loops):
        all_reduce(buffer, group=group, algorithm=way)
    return (time.perf_counter() - started_s) / loops


def _measure(size_bytes: int, num_blocks: int, sample_s: float) -> tuple[dict[str, list[float]], str]:
    """On every rank: seconds by way and round; the slowest rank counts. Also what `auto` picked."""
    picks: list[events.Event] = []
    end = events.subscribe(picks.append, events.DecisionEvent)
    buffer, group = torch.zeros(size_bytes // 4), twin_group(resolve_group(None))
    ways = {"auto": AUTO, **{way or "backend": way for way in _WAYS}}
    for way in ways.values():
        all_reduce(buffer, group=group, algorithm=way)  # here "auto" measures and picks
    end()
    warm = torch.tensor([_sample(way, buffer, group, 10 if size_bytes <= _SMALL_BYTES else 2) for way in ways.values()])
    dist.all_reduce(warm, dist.ReduceOp.MAX)
    most = _MAX_LOOPS if dist.get_backend() == "gloo" else 10**6
    loops = {
        name: max(1, min(most, round(sample_s / seconds))) for name, seconds in zip(ways, warm.tolist(), strict=True)
    }
    in_a_row = max(_LEAST_IN_A_ROW, num_blocks // _NUM_ROUNDS)
    taken = torch.empty(len(ways), num_blocks // in_a_row, in_a_row, dtype=torch.float64)
    for turn in range(taken.size(1)):
        # In both directions, and the first block does not count: the previous algorithm affects caches and cores.
        for index, (name, way) in list(enumerate(ways.items()))[:: 1 if turn % 2 == 0 else -1]:
            blocks = [_sample(way, buffer, group, loops[name]) for _ in range(in_a_row + 1)]
            taken[index, turn] = torch.tensor(blocks[1:], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    [pick] = [event.choice for event in picks if isinstance(event, events.DecisionEvent)]
    return dict(zip(ways, taken.mean(dim=2).tolist(), strict=True)), pick


def _rows(budget: Budget) -> Iterator[Row | Note]:
    world = World()
    sizes = (2**10, 2**20) if budget.is_quick else tuple(2**power for power in range(8, 27, 3))
    worst, num_rows = (0.0, ""), 0
    beyond: list[str] = []
    try:
        for backend in _BACKENDS:
            for num_ranks in (2,) if budget.is_quick else (2, 3, 4):
                for size_bytes in sizes:
                    taken, pick = world.run(
                        _measure,
                        size_bytes,
                        _num_blocks(backend, size_bytes, budget),
                        budget.sample_s,
                        num_ranks=num_ranks,
                        backend=backend,
                        timeout_s=_TIMEOUT_S,
                    )[0]
                    measured = {name: Measurement.of(samples) for name, samples in taken.items()}
                    auto = measured.pop("auto")
                    name = f"{backend}, {num_ranks} ranks, {size_bytes >> 10 or size_bytes / 1024:g} KB ({pick})"
                    best = min(measured, key=lambda way: measured[way].median)
                    picked = measured[pick].median / measured[best].median
                    worst, num_rows = max(worst, (picked, name)), num_rows + 1
                    if picked > _CLOSE:
                        beyond.append(name)
                    yield Row(name=name, unit=Unit.SECONDS, ours=auto, rivals=measured, x=size_bytes)
    finally:
        world.close()
    yield Note(
        text=f"The algorithm auto picked, called by name, is within 10 % of the best in {num_rows - len(beyond)} of "
        f"{num_rows} rows, and takes at most {worst[0]:.2f} times as long: {worst[1]}."
        + (f" Beyond 10 %: {'; '.join(beyond)}." if beyond else "")
    )


def _num_blocks(backend: str, size_bytes: int, budget: Budget) -> int:
    if backend != "gloo" or budget.is_quick:
        return budget.num_samples
    return _NUM_SMALL_BLOCKS if size_bytes <= _SMALL_BYTES else _NUM_LARGE_BLOCKS


CASE = Case(
    title="All-reduce algorithms: what `auto` picks against all others",
    about="""One all-reduce of float32, seconds on the slowest rank, all algorithms in turns on one group that we make.
    Ours is algorithm="auto", its pick in brackets; the rivals are our algorithms by name and the backend's own
    all-reduce. The claim: the algorithm picked, called by name, takes at most 1.1 times as long as the fastest.""",
    rows=_rows,
    x_label="bytes",
)
