"""One of our parts against torch's: starts the ranks, measures in turns, shows and writes the rows.

Each rank runs this module, under any launcher: between nodes,
`torsh run --nnodes 2 … -m torsh_distributed.cli.bench.rivals.contest ddp` shows the same table on rank 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from torsh_distributed.cli.bench.collectives import describe_machine, parse_size
from torsh_distributed.cli.bench.rivals.rows_table import table_of_rows
from torsh_distributed.cli.bench.rivals.side_by_side import Row, SampleBudget, row_from
from torsh_distributed.comm.backends.capabilities import BackendType, choose_backend
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ProcessFailure
from torsh_distributed.launch.job import launch_job
from torsh_distributed.launch.mpi.mpi_job import mpi_job
from torsh_distributed.launch.spec import Entry, EntryKind, JobSpec
from torsh_distributed.launch.worker.init import distributed

CONTESTS = ("p2p", "ddp", "fsdp", "pipeline", "checkpoint")
"""Those of several ranks; each is a module of this package with a function `rows`."""
SAMPLE_S = 0.05
"""A sample of a short workload lasts about this long."""


@dataclass(frozen=True, kw_only=True)
class ContestTask:
    """What to measure, and how long."""

    rounds: int
    """Samples of each contestant, in turns."""
    sizes: Sequence[int]
    """Bytes of what is sent or saved."""
    width: int
    """Of the layers of the model that trains."""
    folder: str
    """Where checkpoints are written."""

    @property
    def budget(self) -> SampleBudget:
        """For workloads that are repeated within a sample."""
        return SampleBudget(num_samples=self.rounds, sample_s=SAMPLE_S)


def rivals_groups() -> dict[str, dist.ProcessGroup]:
    """Groups of the world for torch's parts, by title; every rank calls this.

    torch's part on the same backend shows what our part adds, on torch's own backend what a script has without us.
    """
    world = dist.group.WORLD
    assert world is not None, "the caller initialised the world"
    ours, theirs = process_group.backend(), "gloo"
    groups = {f"torch, {ours}": world}
    if process_group.device().type == "cuda":
        if process_group.local_world_size() > torch.cuda.device_count():
            return groups  # ranks share a GPU, which neither nccl nor all of gloo can do
        theirs = "nccl"
    if theirs != ours:
        groups[f"torch, {theirs}"] = dist.new_group(backend=theirs)
    return groups


def run_contest(name: str, *, backend: str = "auto", world: int, output: Path | None, **options: str | int) -> None:
    """Start local ranks that measure, and print the table of what the first of them writes."""
    choose_backend(backend)
    for size in str(options.get("sizes", "1MB")).split(","):
        parse_size(size)
    with tempfile.TemporaryDirectory(prefix="torsh-bench-") as folder:
        out = Path(folder) / "rows.json"
        args = [name, "--backend", backend, "--json", str(out)]
        for key, value in options.items():
            args += [f"--{key}", str(value)]
        entry = Entry(kind=EntryKind.MODULE, target="torsh_distributed.cli.bench.rivals.contest", args=tuple(args))
        spec = JobSpec(entry=entry, nproc_per_node=world, env={"OMP_NUM_THREADS": "1"})
        with mpi_job(spec) if backend == BackendType.MPI else nullcontext(spec) as job:
            exit_code = launch_job(job)
        if exit_code:
            raise ProcessFailure(f"measuring {name} failed", exit_code=exit_code, backend=backend)
        record = json.loads(out.read_text())
    rows = [row_from(written) for written in record["rows"]]
    show_rows(rows, title=record["title"], header=name, output=output)


def show_rows(rows: Sequence[Row], *, title: str, header: str, output: Path | None) -> None:
    """Print the table; write the rows too, if a file is named."""
    caption = f"samples of each: {rows[0].ours.num_samples}, taken in turns; medians. Above 1× ours is better"
    Console(highlight=False).print(table_of_rows(rows, title=title, header=header, caption=caption))
    if output is not None:
        write_rows(rows, output, title=title)


def write_rows(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """The rows with their ratios, and the machine, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = [{**asdict(row), "ratios": row.ratios} for row in rows]
    path.write_text(json.dumps({"machine": describe_machine(), "title": title, "rows": found}, indent=1) + "\n")


def main() -> None:
    """What every rank runs: measure; rank 0 writes the result to a file, or shows it if none is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contest", choices=CONTESTS)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default="1MB")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--folder", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as its workers are told: rivals differ in how many they would take
    task = ContestTask(
        rounds=options.rounds,
        sizes=[parse_size(text) for text in options.sizes.split(",")],
        width=options.width,
        folder=options.folder,
    )
    rows_of: Callable[[ContestTask], Iterator[Row]] = _module(options.contest).rows
    with distributed(backend=options.backend):
        if process_group.device().type == "cuda":
            torch.cuda.set_device(process_group.device())
        rows = list(rows_of(task))
        if process_group.rank() == 0:
            title = f"{dist.get_world_size()} ranks on {process_group.backend()}, {process_group.device().type}"
            if options.json is not None:
                write_rows(rows, options.json, title=title)
            else:
                show_rows(rows, title=title, header=options.contest, output=None)


def _module(name: str) -> Any:
    return importlib.import_module(f"torsh_distributed.cli.bench.rivals.{name}")


if __name__ == "__main__":
    main()
