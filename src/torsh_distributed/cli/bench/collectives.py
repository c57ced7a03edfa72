"""`torsh bench collectives`: each backend against the others, in one run."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from torsh_distributed.comm.backends.capabilities import BackendType, choose_backend
from torsh_distributed.comm.measurement import OPERATIONS
from torsh_distributed.errors import InvalidArgument, ProcessFailure
from torsh_distributed.launch.job import launch_job
from torsh_distributed.launch.mpi.mpi_job import mpi_job
from torsh_distributed.launch.spec import Entry, EntryKind, JobSpec

app = typer.Typer(add_completion=False)

_UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
_DEFAULT_SIZES = "1KB,64KB,1MB,16MB,128MB"


@app.command()
def collectives(
    backends: Annotated[str, typer.Option(help="Backends, by comma; ratios are against the last.")] = "shm,torsh,gloo",
    ops: Annotated[str, typer.Option(help=f"Operations: {', '.join(OPERATIONS)}.")] = "all_reduce",
    sizes: Annotated[str, typer.Option(help="Buffer sizes, such as 1KB,16MB.")] = _DEFAULT_SIZES,
    world: Annotated[str, typer.Option(help="World sizes, by comma.")] = "2",
    rounds: Annotated[int, typer.Option(min=1, help="Every backend is measured this often, in turns.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time for one operation at one size in a round.")] = 0.3,
    output: Annotated[Path | None, typer.Option("--json", help="File for the numbers, as JSON.")] = None,
) -> None:
    """Time collectives on local ranks, each backend against the last.

    Shows the median over all rounds; the backends take turns in each round.
    """
    names = [name.strip() for name in backends.split(",")]
    for name in names:
        choose_backend(name)
    bytes_of = [parse_size(text) for text in sizes.split(",")]
    console = Console(highlight=False)
    results: list[dict[str, Any]] = []
    for num_ranks in (int(text) for text in world.split(",")):
        found = _measure(names, num_ranks, ops=ops, sizes=bytes_of, rounds=rounds, seconds=seconds)
        console.print(_table(found, names, num_ranks))
        results += [{"num_ranks": num_ranks, **row} for row in found]
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"machine": describe_machine(), "results": results}, indent=1) + "\n")
        console.print(f"written to {output}")


def parse_size(text: str) -> int:
    """`16MB` as bytes; KB, MB and GB are powers of two."""
    stripped = text.strip().upper()
    digits = stripped.rstrip("KMGB")
    unit = stripped[len(digits) :]
    if not digits.isdigit() or unit not in _UNITS:
        raise InvalidArgument("a size is a whole number and B, KB, MB or GB", hint="for example 64KB", size=text)
    return int(digits) * _UNITS[unit]


def _measure(
    names: list[str], num_ranks: int, *, ops: str, sizes: list[int], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """A row for each operation and size, with every backend's seconds of each round."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for _ in range(rounds):
        for name in names:
            for timing in _run(name, num_ranks, ops=ops, sizes=sizes, seconds=seconds):
                key = (timing["op"], timing["num_bytes"])
                row = rows.setdefault(key, {"op": key[0], "num_bytes": key[1], "seconds": {n: [] for n in names}})
                row["seconds"][name].append(timing["median_s"])
    return list(rows.values())


def _run(name: str, num_ranks: int, *, ops: str, sizes: list[int], seconds: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="torsh-bench-") as folder:
        out = Path(folder) / "timings.json"
        args = ("--backend", name, "--ops", ops, "--sizes", ",".join(map(str, sizes)), "--seconds", str(seconds))
        entry = Entry(
            kind=EntryKind.MODULE,
            target="torsh_distributed.cli.bench.collectives_worker",
            args=(*args, "--out", str(out)),
        )
        spec = JobSpec(entry=entry, nproc_per_node=num_ranks, env={"OMP_NUM_THREADS": "1"})
        with mpi_job(spec) if name == BackendType.MPI else nullcontext(spec) as job:
            exit_code = launch_job(job)
        if exit_code:
            raise ProcessFailure(f"measuring {name} failed", exit_code=exit_code, backend=name)
        timings: list[dict[str, Any]] = json.loads(out.read_text())
        return timings


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _table(rows: list[dict[str, Any]], names: list[str], num_ranks: int) -> Table:
    base = names[-1]
    table = Table(
        title=f"{num_ranks} ranks, float32, medians: time below 1 MB, else buffer bytes per second; "
        f"× is how much faster than {base}"
    )
    table.add_column("operation")
    table.add_column("size", justify="right")
    for name in names:
        table.add_column(name, justify="right")
        if name != base:
            table.add_column(f"× {base}", justify="right", style="bold")
    for row in rows:
        cells = [row["op"], show_size(row["num_bytes"])]
        reference = _median(row["seconds"][base])
        for name in names:
            taken = _median(row["seconds"][name])
            cells.append(_show_time(taken, row["num_bytes"]))
            if name != base:
                cells.append(f"{reference / taken:.1f}")
        table.add_row(*cells)
    return table


def _show_time(seconds: float, num_bytes: int) -> str:
    if num_bytes >= 2**20:
        return f"{num_bytes / seconds / 1e9:.2f} GB/s"
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def show_size(num_bytes: int) -> str:
    """A size in the largest unit that fits it."""
    for unit in ("GB", "MB", "KB"):
        if num_bytes >= _UNITS[unit] and num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]} {unit}"
    return f"{num_bytes} B"


def describe_machine() -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
