"""torch's gloo in a group that we make, whose threads do not preempt, against the same gloo in torch's own group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Budget, Case, Measurement, Row, Unit
from tests.bed.world import World
from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.groups.manager import twin_group

KB, MB = 2**10, 2**20
_SIZES = {"1 KB": KB, "64 KB": 64 * KB, "1 MB": MB, "16 MB": 16 * MB}
_DDP, _BESIDE = "DDP step", "all_reduce, 16 MB, beside products of matrices"
_CASES = (*(f"{op}, {size}" for op in ("all_reduce", "all_gather") for size in _SIZES), _BESIDE, _DDP)

Samples = dict[str, list[float]]
"""Seconds of one call, by the group's maker."""


def _body(case: str, group: dist.ProcessGroup) -> Callable[[], object]:
    """What is timed."""
    if case == _DDP:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))), process_group=group)
        batch = torch.randn(8, 1024)
        return lambda: model(batch).square().mean().backward()
    buffer = torch.zeros((16 * MB if case == _BESIDE else _SIZES[case.split(", ")[1]]) // 4)
    if case == _BESIDE:
        matrix = torch.randn(512, 512)

        def beside() -> None:
            work = dist.all_reduce(buffer, group=group, async_op=True)
            for _ in range(4):
                matrix @ matrix
            assert work is not None, "it is asynchronous"
            work.wait()

        return beside
    if case.startswith("all_gather"):
        parts = [torch.empty_like(buffer) for _ in range(group.size())]
        return lambda: dist.all_gather(parts, buffer, group=group)
    return lambda: dist.all_reduce(buffer, group=group)


def _measure(case: str, num_rounds: int, num_blocks: int, num_calls: int) -> Samples:
    """On every rank; the slowest one counts. The groups take turns, round by round."""
    theirs = resolve_group(None)
    groups = {"ours": twin_group(theirs), "torch": theirs}
    bodies = {name: _body(case, group) for name, group in groups.items()}
    taken: Samples = {name: [] for name in groups}
    for body in bodies.values():
        body()
    for _ in range(num_rounds):
        for name, group in groups.items():
            for _ in range(num_blocks):
                dist.barrier(group)
                started_s = time.perf_counter()
                for _ in range(num_calls):
                    bodies[name]()
                taken[name].append((time.perf_counter() - started_s) / num_calls)
    slowest = torch.tensor([taken["ours"], taken["torch"]], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(groups, slowest.tolist(), strict=True))


def _rows(budget: Budget) -> Iterator[Row]:
    world = World()
    try:
        for num_ranks in (2,) if budget.is_quick else (2, 4):
            for case in (_CASES[0], _DDP) if budget.is_quick else _CASES:
                is_large = case == _DDP or "16 MB" in case
                num_calls = 2 if budget.is_quick else 5 if is_large else 20
                rounds = (1, 2) if budget.is_quick else (8, 5)
                taken = world.run(_measure, case, *rounds, num_calls, num_ranks=num_ranks, timeout_s=300)[0]
                yield Row(
                    name=f"{case}, {num_ranks} ranks",
                    unit=Unit.SECONDS,
                    ours=Measurement.of(taken["ours"]),
                    rivals={"torch's group": Measurement.of(taken["torch"])},
                )
    finally:
        world.close()


CASE = Case(
    title="gloo with threads that do not preempt",
    about="""The same gloo, called through torch.distributed, in a group that we make and in one that torch makes. Ours
    starts gloo's threads with the policy SCHED_BATCH. float32; the size of all_gather is that of a rank's part. A
    sample is 20 calls in a row, five for large sizes; 40 samples, the groups in turns; the slowest rank counts. The
    DDP step is forward and backward of 8 layers of 1024 by 1024 on a batch of 8, under torch's own DDP.""",
    rows=_rows,
)
