"""`torsh bench checkpoint`: saving and loading training state, ours, torch.save and torch's DCP."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from torch import Tensor, nn

from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.cli.bench.collectives import show_size
from torsh_distributed.cli.bench.rivals.contest import ContestTask, run_contest
from torsh_distributed.cli.bench.rivals.side_by_side import Row, RowUnit, SampleBudget, Workload, compare
from torsh_distributed.comm.collectives.objects import broadcast_object
from torsh_distributed.comm.measurement import time_on_all_ranks
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import CheckpointConfig

_TENSOR_BYTES = 8 << 20

app = typer.Typer(add_completion=False)


@app.command()
def checkpoint(
    world: Annotated[int, typer.Option(min=1, help="Local ranks; each saves a part of its own.")] = 2,
    size: Annotated[str, typer.Option(help="State of a rank, such as 256MB.")] = "256MB",
    folder: Annotated[
        Path | None, typer.Option(help="A folder on the disk to measure; else that of temporary files.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Every side is measured this often, in turns.")] = 5,
    output: Annotated[Path | None, typer.Option("--json", help="File for the numbers, as JSON.")] = None,
) -> None:
    """Time saving and loading on local ranks, ours beside torch.save and torch's DCP.

    A save ends when it is on the disk, on every side. Ours are hashed while they are written and verified before they
    are loaded. What is loaded may still be in the system's memory, on every side.
    """
    if "," in size:
        raise InvalidArgument("a checkpoint is measured at one size", hint="for example 256MB", size=size)
    if folder is not None and not folder.is_dir():
        raise InvalidArgument(
            "the folder to write checkpoints to does not exist", hint="create it first", folder=str(folder)
        )
    chosen = str(folder.absolute()) if folder is not None else tempfile.gettempdir()
    run_contest("checkpoint", backend="gloo", world=world, output=output, sizes=size, folder=chosen, rounds=rounds)


def rows(task: ContestTask) -> Iterator[Row]:
    """Saving, saving in the background and loading; runs on every rank."""
    num_bytes = task.sizes[0]
    state = _state(num_bytes)
    held = {"model": _module_of(state)}
    shown = f"{show_size(num_bytes)} a rank"
    # A save is long and leaves files: one call is a sample.
    one_call = SampleBudget(num_samples=task.rounds, sample_s=0.0)
    amount, rate = num_bytes * dist.get_world_size(), RowUnit.BYTES_PER_SECOND
    # DCP's background thread has collectives of its own: on a group of their own, they meet no others.
    group = dist.new_group(backend="gloo")
    with _folder(task.folder) as place, _manager(place) as manager, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # two places are written in turns
        measured = partial(compare, budget=one_call, amount=amount, unit=rate, timed=time_on_all_ranks)
        steps, turns = itertools.count(1), itertools.count()
        plain = place / f"plain-{dist.get_rank()}"
        yield measured(
            f"save, {shown}",
            lambda: manager.save(next(steps), held),
            {
                "torch.save": lambda: _torch_save(state, plain),
                "DCP": lambda: dcp.save(state, checkpoint_id=place / f"dcp-{next(turns) % 2}", process_group=group),
            },
        )
        pending: list[Any] = []

        def save_with_dcp() -> None:
            name = place / f"async-{next(turns) % 2}"
            pending.append(dcp.async_save(state, checkpoint_id=name, process_group=group))

        def settle() -> None:
            manager.wait()
            for one in pending:
                one.result()
            pending.clear()

        yield compare(
            f"save in the background, {shown}: training waits",
            lambda: manager.save(next(steps), held, wait=False),
            {"DCP": save_with_dcp},
            budget=one_call,
            timed=_settled_by(settle),
        )
        yield measured(
            f"load, {shown}",
            lambda: manager.load(held),
            {
                "torch.save": lambda: torch.load(plain, weights_only=True),
                "DCP": lambda: dcp.load(state, checkpoint_id=place / "dcp-0"),
            },
        )


def _state(num_bytes: int) -> dict[str, Tensor]:
    """This rank's part of the state, in tensors of 8 MB at most, by names of its own."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    sizes = [min(_TENSOR_BYTES, num_bytes - start) for start in range(0, num_bytes, _TENSOR_BYTES)]
    return {f"rank{rank}_{number}": torch.randn(max(1, size // 4)) for number, size in enumerate(sizes)}


def _module_of(state: dict[str, Tensor]) -> nn.Module:
    """The same memory as buffers of a module: tensors that only one rank has belong to a module."""
    module = nn.Module()
    for name, value in state.items():
        module.register_buffer(name, value)
    return module


@contextmanager
def _folder(parent: str) -> Iterator[Path]:
    """A new folder that all ranks share; the first rank makes and removes it."""
    is_first = dist.get_rank() == 0
    place = Path(broadcast_object(tempfile.mkdtemp(prefix="torsh-bench-", dir=parent or None) if is_first else None, 0))
    try:
        yield place
    finally:
        if is_first:
            shutil.rmtree(place)


def _manager(place: Path) -> CheckpointManager:
    return CheckpointManager(CheckpointConfig(dir=str(place / "ours"), keep=1, keep_best=0, verify_after_save=False))


def _torch_save(state: dict[str, Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _settled_by(settle: Workload) -> Callable[[Workload, int], float]:
    """Only the call is timed; what it has left to the background is waited for before the next one."""

    def timed(workload: Workload, loops: int) -> float:
        seconds = time_on_all_ranks(workload, loops)
        settle()
        return seconds

    return timed
