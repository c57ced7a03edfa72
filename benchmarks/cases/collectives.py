"""Collectives between ranks of one node: shm against gloo and raw MPICH, all in one run."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import World
from torsh_distributed.comm.measurement import time_collective

KB, MB = 2**10, 2**20
_OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_SIZES = {"all_reduce": (KB, 64 * KB, MB, 16 * MB, 128 * MB)}
_OTHER_SIZES = (MB, 16 * MB)
_BY_US = (KB, 64 * KB)  # sizes at which the path to the backend counts: also through td.all_reduce

Times = dict[tuple[str, int], float]
"""Seconds per call by operation and size."""

# The loop of `torsh bench collectives` on numpy buffers and mpi4py's own calls: MPI without our code.
_RAW_MPI = """
import json, statistics, sys, time
import numpy as np
from mpi4py import MPI
world, plan, duration_s = MPI.COMM_WORLD, json.loads(sys.argv[1]), float(sys.argv[2])
size, found = world.Get_size(), []
def block(call, calls):
    world.Barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return world.allreduce(time.perf_counter() - started, op=MPI.MAX)
for op, num_bytes in plan:
    whole = np.zeros(num_bytes // 4, np.float32)
    part, other = np.zeros(whole.size // size, np.float32), np.empty_like(whole)
    even = whole[: part.size * size]
    call = {
        "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, whole),
        "broadcast": lambda: world.Bcast(whole, 0),
        "all_gather": lambda: world.Allgather(part, even),
        "reduce_scatter": lambda: world.Reduce_scatter_block(even, part),
        "all_to_all": lambda: world.Alltoall(even, other[: even.size]),
    }[op]
    call()
    calls, spent = 1, block(call, 1)
    while spent < duration_s / 10 and calls < 20000:
        calls = min(20000, max(calls * 2, int(calls * duration_s / 10 / spent)))
        spent = block(call, calls)
    found.append([op, num_bytes, statistics.median(block(call, calls) / calls for _ in range(5))])
if world.Get_rank() == 0:
    json.dump(found, open(sys.argv[3], "w"))
"""


def plan_of(op_names: tuple[str, ...]) -> list[tuple[str, int]]:
    """Every operation with every size at which it is measured."""
    return [(op, size) for op in op_names for size in _SIZES.get(op, _OTHER_SIZES)]


def time_all(plan: list[tuple[str, int]], duration_s: float) -> Times:
    """Runs on every rank, inside a group of the backend under test."""
    return {(op, size): time_collective(op, size, duration_s=duration_s).median_s for op, size in plan}


def shown(num_bytes: int) -> str:
    """A size as the tables show it."""
    return f"{num_bytes // MB} MB" if num_bytes >= MB else f"{num_bytes // KB} KB"


def copy_s(num_bytes: int, num_calls: int = 20) -> float:
    """Seconds for all ranks to copy a buffer of that size at once: the limit set by the machine's memory."""
    source = torch.zeros(num_bytes // 4)
    target = torch.empty_like(source).copy_(source)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(num_calls):
        target.copy_(source)
    spent = torch.tensor((time.perf_counter() - started) / num_calls, dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def raw_mpi(num_ranks: int, plan: list[tuple[str, int]], duration_s: float) -> Times:
    """mpi4py on numpy buffers under mpiexec, without torch."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(num_ranks), sys.executable, "-c", _RAW_MPI]
        subprocess.run(
            [*command, json.dumps(plan), str(duration_s), str(out)],
            check=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return {(op, size): seconds for op, size, seconds in json.loads(out.read_text())}


def _rows(budget: Budget) -> Iterator[Row | Note]:
    has_mpi = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) is not None
    if not has_mpi:
        yield Note(text="MPICH is not measured: the [mpi] extra is not installed.")
    rounds, duration_s = (1, 0.02) if budget.is_quick else (5, 0.4)
    plan = [("all_reduce", KB), ("all_to_all", MB)] if budget.is_quick else plan_of(_OPS)
    by_us = [size for size in _BY_US if ("all_reduce", size) in plan]
    world = World()
    try:
        for num_ranks in (2,) if budget.is_quick else (2, 4):
            contestants: dict[str, Callable[[], Times]] = {
                name: lambda name=name, num_ranks=num_ranks, more=more: world.run(  # type: ignore[misc]
                    time_all, [*plan, *more], duration_s, num_ranks=num_ranks, backend=name, timeout_s=300
                )[0]
                for name, more in (("shm", [("td.all_reduce", size) for size in by_us]), ("gloo", []))
            }
            if has_mpi:
                contestants["mpich"] = lambda num_ranks=num_ranks: raw_mpi(num_ranks, plan, duration_s)  # type: ignore[misc]
            found = [{name: measure() for name, measure in contestants.items()} for _ in range(rounds)]
            for op, size in plan:
                by_name = {name: Measurement.of([one[name][op, size] for one in found]) for name in contestants}
                ours = by_name.pop("shm")
                yield Row(name=f"{op}, {num_ranks} ranks, {shown(size)}", unit=Unit.SECONDS, ours=ours, rivals=by_name)
            for size in by_us:
                yield Row(
                    name=f"td.all_reduce, {num_ranks} ranks, {shown(size)}",
                    unit=Unit.SECONDS,
                    ours=Measurement.of([one["shm"]["td.all_reduce", size] for one in found]),
                    rivals={
                        name: Measurement.of([one[name]["all_reduce", size] for one in found])
                        for name in contestants
                        if name != "shm"
                    },
                )
            size = plan[0][1] if budget.is_quick else 16 * MB
            copies = [world.run(copy_s, size, num_ranks=num_ranks, backend="shm")[0] for _ in range(rounds)]
            copy = statistics.median(copies)
            reduce = statistics.median(one["shm"]["all_reduce", size] for one in found)
            yield Note(
                text=f"Memory: {num_ranks} ranks that each copy {shown(size)} at once need {copy * 1e3:.2f} ms"
                f" ({num_ranks * size / copy / 1e9:.1f} GB/s together); their all-reduce on shm takes"
                f" {reduce / copy:.1f} times that."
            )
    finally:
        world.close()


CASE = Case(
    title="Collectives on one node",
    about="""float32 buffers; the size is the whole buffer. gloo and ours (shm) are called through torch.distributed,
    MPICH (the PyPI wheel) through mpi4py on numpy buffers, without torch. Small all-reduces are also measured with our
    td.all_reduce, which records each and calls the backend directly. The contestants take turns, five rounds each; the
    slowest rank counts. The 4-rank rows have more ranks than this machine has cores.""",
    rows=_rows,
)
