"""`torsh bench fsdp`: a training step of shards, our wrapper and torch's FSDP2 by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from torsh_distributed.cli.bench.rivals.contest import ContestTask, rivals_groups, run_contest
from torsh_distributed.cli.bench.rivals.side_by_side import Row, compare
from torsh_distributed.cli.bench.rivals.training_steps import describe_layers, layers, step_of
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.measurement import time_on_all_ranks
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
from torsh_distributed.plan import FsdpConfig

app = typer.Typer(add_completion=False)


@app.command()
def fsdp(
    backend: Annotated[str, typer.Option(help="Our backend.")] = "auto",
    world: Annotated[int, typer.Option(min=1, help="Local ranks.")] = 2,
    width: Annotated[int, typer.Option(min=1, help="Width of the eight linear layers.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Every side is measured this often, in turns.")] = 9,
    output: Annotated[Path | None, typer.Option("--json", help="File for the numbers, as JSON.")] = None,
) -> None:
    """Time a training step of full shards on local ranks, ours beside torch's fully_shard.

    torch's is applied to each layer and to the whole. "alone" is the same step without communication, on whole weights.
    """
    run_contest("fsdp", backend=backend, world=world, output=output, width=width, rounds=rounds)


def rows(task: ContestTask) -> Iterator[Row]:
    """One row; runs on every rank."""
    width = task.width
    rivals = {name: step_of(_by_hand(width, group), width) for name, group in rivals_groups().items()}
    ours = FullyShardedDataParallel(layers(width), FsdpConfig(strategy="full_shard"))
    yield compare(
        f"a step, {describe_layers(width)}",
        step_of(ours, width),
        {**rivals, "alone": step_of(layers(width), width)},
        budget=task.budget,
        timed=time_on_all_ranks,
    )


def _by_hand(width: int, group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, process_group.device().type)
    model = layers(width)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
