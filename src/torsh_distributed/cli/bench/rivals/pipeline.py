"""`torsh bench pipeline`: a step of a pipeline, ours and torch's schedule by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from torsh_distributed.cli.bench.rivals.contest import ContestTask, rivals_groups, run_contest
from torsh_distributed.cli.bench.rivals.side_by_side import Row, Workload, compare
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.measurement import time_on_all_ranks
from torsh_distributed.parallel.pipeline import PipelineParallel
from torsh_distributed.plan.sections.mesh import PipelineConfig

_LAYERS_PER_STAGE = 4
_MICROBATCHES_PER_RANK = 4
_MICROBATCH = 32

app = typer.Typer(add_completion=False)


@app.command()
def pipeline(
    backend: Annotated[str, typer.Option(help="Our backend.")] = "auto",
    world: Annotated[int, typer.Option(min=2, help="Local ranks; a stage of four linear layers each.")] = 2,
    width: Annotated[int, typer.Option(min=1, help="Width of the layers.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Every side is measured this often, in turns.")] = 9,
    output: Annotated[Path | None, typer.Option("--json", help="File for the numbers, as JSON.")] = None,
) -> None:
    """Time a step of a pipeline on local ranks, ours beside torch's Schedule1F1B.

    Forward and backward of four microbatches of 32 samples for each rank. After ours every rank has the loss, after
    torch's the last one.
    """
    run_contest("pipeline", backend=backend, world=world, output=output, width=width, rounds=rounds)


def rows(task: ContestTask) -> Iterator[Row]:
    """One row; runs on every rank."""
    num_microbatches = _MICROBATCHES_PER_RANK * dist.get_world_size()
    batch = torch.randn(_MICROBATCH * num_microbatches, task.width, device=process_group.device())
    rivals = {name: _by_hand(task.width, group, batch, num_microbatches) for name, group in rivals_groups().items()}
    yield compare(
        f"a step, {num_microbatches} microbatches",
        _ours(task.width, batch, num_microbatches),
        rivals,
        budget=task.budget,
        timed=time_on_all_ranks,
    )


def _layers(width: int, count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).to(process_group.device())


def _ours(width: int, batch: torch.Tensor, num_microbatches: int) -> Workload:
    world = dist.group.WORLD
    assert world is not None, "the caller initialised the world"
    config = PipelineConfig(schedule="one_f_one_b", num_microbatches=num_microbatches)
    model = _layers(width, _LAYERS_PER_STAGE * dist.get_world_size())
    pipe = PipelineParallel(model, config, group=world, loss_fn=nn.functional.mse_loss)

    def step() -> None:
        pipe.step(batch, batch)
        pipe.module.zero_grad()

    return step


def _by_hand(width: int, group: dist.ProcessGroup, batch: torch.Tensor, num_microbatches: int) -> Workload:
    """This rank's stage under torch's schedule, which takes the batch on the first rank and targets on the last."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = _layers(width, _LAYERS_PER_STAGE)
    stage = PipelineStage(module, rank, size, process_group.device(), group=group)
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=nn.functional.mse_loss)
    inputs = (batch,) if rank == 0 else ()
    target = batch if rank == size - 1 else None

    def step() -> None:
        schedule.step(*inputs, target=target)
        module.zero_grad()

    return step
