"""`torsh bench p2p`: a message to another rank and back, ours and torch's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from torsh_distributed.cli.bench.collectives import show_size
from torsh_distributed.cli.bench.rivals.contest import ContestTask, rivals_groups, run_contest
from torsh_distributed.cli.bench.rivals.side_by_side import Row, Workload, compare
from torsh_distributed.comm.collectives.point_to_point import recv, send
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.measurement import time_on_all_ranks

app = typer.Typer(add_completion=False)


@app.command()
def p2p(
    backend: Annotated[str, typer.Option(help="Our backend.")] = "auto",
    world: Annotated[int, typer.Option(min=2, help="Local ranks; the first two send.")] = 2,
    sizes: Annotated[str, typer.Option(help="Sizes of the messages, such as 1KB,16MB.")] = "1KB,64KB,1MB,16MB",
    rounds: Annotated[int, typer.Option(min=1, help="Every side is measured this often, in turns.")] = 9,
    output: Annotated[Path | None, typer.Option("--json", help="File for the numbers, as JSON.")] = None,
) -> None:
    """Time messages between two local ranks, ours beside torch's.

    A row is the time of a message in one direction: half of the way to the other rank and back.
    """
    run_contest("p2p", backend=backend, world=world, output=output, sizes=sizes, rounds=rounds)


def rows(task: ContestTask) -> Iterator[Row]:
    """A row for each size; runs on every rank."""
    groups = rivals_groups()
    for num_bytes in task.sizes:
        buffer = torch.zeros(max(1, num_bytes // 4), device=process_group.device())
        ours = _there_and_back(buffer, None)
        rivals = {name: _there_and_back(buffer, group) for name, group in groups.items()}
        yield compare(
            f"a message of {show_size(num_bytes)}",
            ours,
            rivals,
            budget=task.budget,
            amount=2,
            timed=time_on_all_ranks,
        )


def _there_and_back(buffer: torch.Tensor, group: dist.ProcessGroup | None) -> Workload:
    """Our calls, or torch's on `group`; ranks after the first two have nothing to do."""
    rank = dist.get_rank()
    if rank > 1:
        return lambda: None
    peer = 1 - rank

    def ours() -> None:
        for turn in (0, 1):
            if turn == rank:
                send(buffer, peer)
            else:
                recv(buffer, peer)

    def theirs() -> None:
        for turn in (0, 1):
            if turn == rank:
                dist.send(buffer, peer, group=group)
            else:
                dist.recv(buffer, peer, group=group)

    return ours if group is None else theirs
