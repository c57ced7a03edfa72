"""How fast a test gets its ranks: the test bed's worlds against torch.multiprocessing."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness import Budget, Case, Note, Row, compare
from tests.bed.world import World


def _reduce() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def _spawned(rank: int, num_ranks: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    _reduce()
    dist.destroy_process_group()


def _spawn(num_ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, str(Path(folder) / "store"))
        mp.spawn(_spawned, args=arguments, nprocs=num_ranks)  # type: ignore[no-untyped-call] # torch's, untyped


def _rows(budget: Budget) -> Iterator[Row | Note]:
    world = World()
    if budget.is_quick:
        budget = dataclasses.replace(budget, num_samples=1)
    try:
        for num_ranks in (2,) if budget.is_quick else (2, 4, 8):
            yield compare(
                f"{num_ranks} ranks",
                lambda num_ranks=num_ranks: world.run(_reduce, num_ranks=num_ranks),  # type: ignore[misc]
                {"torch spawn": lambda num_ranks=num_ranks: _spawn(num_ranks)},  # type: ignore[misc]
                budget=budget,
                x=num_ranks,
            )
    finally:
        world.close()


CASE = Case(
    title="Test bed: starting and ending a world",
    about="""Start the ranks, set up a gloo group, reduce one number, tear down, collect the results. Ours forks from a
    process that has already imported torch (its start, once per test run, is not counted); the rival is
    torch.multiprocessing.spawn.""",
    rows=_rows,
    x_label="ranks",
)
