"""`torsh bench network`: latency and bandwidth between ranks, over several measurements.

Each rank runs this module, under any launcher: between nodes,
`torsh run --nnodes 2 … -m torsh_distributed.cli.bench.network` shows the same table on rank 0.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from torsh_distributed.cli.bench.collectives import describe_machine, parse_size
from torsh_distributed.comm.backends.capabilities import BackendType, choose_backend
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.measurement import SIZES, NetworkMetrics, NetworkProfiler
from torsh_distributed.errors import ProcessFailure
from torsh_distributed.launch.job import launch_job
from torsh_distributed.launch.mpi.mpi_job import mpi_job
from torsh_distributed.launch.spec import Entry, EntryKind, JobSpec
from torsh_distributed.launch.worker.init import distributed

_SIZES = ",".join(f"{size // 1024}KB" for size in SIZES)

app = typer.Typer(add_completion=False)


@app.command()
def network(
    backend: Annotated[str, typer.Option(help="The backend to measure.")] = "torsh",
    world: Annotated[int, typer.Option(min=2, help="Local ranks.")] = 2,
    looks: Annotated[int, typer.Option(min=1, help="How often to measure.")] = 5,
    sizes: Annotated[str, typer.Option(help="Buffer sizes, by comma; two at least.")] = _SIZES,
    output: Annotated[Path | None, typer.Option("--json", help="File for the numbers, as JSON.")] = None,
) -> None:
    """Measure latency and bandwidth between local ranks, by size and over time."""
    choose_backend(backend)
    for text in sizes.split(","):
        parse_size(text)
    args = ["--backend", backend, "--looks", str(looks), "--sizes", sizes]
    if output is not None:
        args += ["--json", str(output.absolute())]
    entry = Entry(kind=EntryKind.MODULE, target="torsh_distributed.cli.bench.network", args=tuple(args))
    spec = JobSpec(entry=entry, nproc_per_node=world, env={"OMP_NUM_THREADS": "1"})
    with mpi_job(spec) if backend == BackendType.MPI else nullcontext(spec) as job:
        exit_code = launch_job(job)
    if exit_code:
        raise ProcessFailure("measuring the network failed", exit_code=exit_code, backend=backend)


def main() -> None:
    """What every rank runs: measure; rank 0 shows and writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--looks", type=int, default=5)
    parser.add_argument("--sizes", default=_SIZES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with distributed(backend=options.backend):
        profiler = NetworkProfiler(sizes=[parse_size(text) for text in options.sizes.split(",")], history=options.looks)
        for _ in range(options.looks):
            profiler.measure()
        if process_group.rank() == 0:
            _show(profiler.history, process_group.backend())
            if options.json is not None:
                _write(options.json, profiler.history)


def _show(looks: tuple[NetworkMetrics, ...], backend: str) -> None:
    table = Table(title=f"{looks[0].num_ranks} ranks on {backend}: all-reduce by size, on the slowest rank")
    for size in looks[0].all_reduce_s:
        table.add_column(f"{size / 1024:g} KB", justify="right")
    for name in ("latency", "bandwidth", "sent again", "congestion", "stability"):
        table.add_column(name, justify="right")
    for look in looks:
        table.add_row(
            *(f"{seconds * 1e3:.3f} ms" for seconds in look.all_reduce_s.values()),
            f"{look.latency_s * 1e6:.0f} µs",
            f"{look.bytes_per_s / 1e6:.0f} MB/s",
            "-" if look.retransmitted is None else f"{look.retransmitted:.2%}",
            f"{look.congestion:.2f}",
            "-" if look.stability is None else f"{look.stability:.2f}",
        )
    Console(highlight=False).print(table)


def _write(path: Path, looks: tuple[NetworkMetrics, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = [{**asdict(look), "latency_s": look.latency_s, "bytes_per_s": look.bytes_per_s} for look in looks]
    path.write_text(json.dumps({"machine": describe_machine(), "looks": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
