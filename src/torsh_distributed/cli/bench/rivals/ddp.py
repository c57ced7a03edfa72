"""`torsh bench ddp`: a training step of replicas, our wrapper and torch's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from torsh_distributed.cli.bench.rivals.contest import ContestTask, rivals_groups, run_contest
from torsh_distributed.cli.bench.rivals.side_by_side import Row, compare
from torsh_distributed.cli.bench.rivals.training_steps import describe_layers, layers, step_of
from torsh_distributed.comm.measurement import time_on_all_ranks
from torsh_distributed.parallel.data.ddp import DistributedDataParallel

app = typer.Typer(add_completion=False)


@app.command()
def ddp(
    backend: Annotated[str, typer.Option(help="Our backend.")] = "auto",
    world: Annotated[int, typer.Option(min=1, help="Local ranks.")] = 2,
    width: Annotated[int, typer.Option(min=1, help="Width of the eight linear layers.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Every side is measured this often, in turns.")] = 9,
    output: Annotated[Path | None, typer.Option("--json", help="File for the numbers, as JSON.")] = None,
) -> None:
    """Time a training step of replicas on local ranks, ours beside torch's DDP.

    Both keep gradients as views of their buckets. "alone" is the same step without communication: the limit.
    """
    run_contest("ddp", backend=backend, world=world, output=output, width=width, rounds=rounds)


def rows(task: ContestTask) -> Iterator[Row]:
    """One row; runs on every rank."""
    width = task.width
    rivals = {
        name: step_of(TorchDDP(layers(width), process_group=group, gradient_as_bucket_view=True), width)
        for name, group in rivals_groups().items()
    }
    yield compare(
        f"a step, {describe_layers(width)}",
        step_of(DistributedDataParallel(layers(width)), width),
        {**rivals, "alone": step_of(layers(width), width)},
        budget=task.budget,
        timed=time_on_all_ranks,
    )
