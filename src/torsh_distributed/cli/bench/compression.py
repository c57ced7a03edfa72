"""`torsh bench compression`: what each method costs and saves on this machine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from torsh_distributed.cli.bench.collectives import describe_machine, parse_size
from torsh_distributed.comm.backends.capabilities import choose_backend
from torsh_distributed.compress.codecs import codec_names, make_codec
from torsh_distributed.errors import ProcessFailure
from torsh_distributed.launch.job import launch_job
from torsh_distributed.launch.spec import Entry, EntryKind, JobSpec

app = typer.Typer(add_completion=False)


@app.command()
def compression(
    methods: Annotated[str, typer.Option(help="Methods, by comma; all of them by default.")] = "",
    size: Annotated[str, typer.Option(help="Size of the gradient, such as 32MB.")] = "32MB",
    backend: Annotated[str, typer.Option(help="The backend that carries the messages.")] = "torsh",
    world: Annotated[int, typer.Option(min=1, help="Local ranks.")] = 2,
    output: Annotated[Path | None, typer.Option("--json", help="File for the numbers, as JSON.")] = None,
) -> None:
    """Time every method on local ranks: encoding, decoding, and a whole average."""
    names = [name.strip() for name in methods.split(",")] if methods else codec_names()
    for name in names:
        make_codec(name)
    choose_backend(backend)
    found = _measure(names, parse_size(size), backend=backend, num_ranks=world)
    console = Console(highlight=False)
    console.print(_table(found, backend, world))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": describe_machine(), "backend": backend, "num_ranks": world, "results": found}
        output.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"written to {output}")


def _measure(names: list[str], num_bytes: int, *, backend: str, num_ranks: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="torsh-bench-") as folder:
        out = Path(folder) / "timings.json"
        args = ("--backend", backend, "--methods", ",".join(names), "--bytes", str(num_bytes), "--out", str(out))
        entry = Entry(kind=EntryKind.MODULE, target="torsh_distributed.cli.bench.compression_worker", args=args)
        spec = JobSpec(entry=entry, nproc_per_node=num_ranks, env={"OMP_NUM_THREADS": "1"})
        exit_code = launch_job(spec)
        if exit_code:
            raise ProcessFailure("measuring compression failed", exit_code=exit_code, backend=backend)
        timings: list[dict[str, Any]] = json.loads(out.read_text())
        return timings


def _table(rows: list[dict[str, Any]], backend: str, num_ranks: int) -> Table:
    table = Table(title=f"{num_ranks} ranks on {backend}, one thread each; GB/s of the fp32 gradient")
    for name in ("method", "encode", "decode", "sent / fp32 ring", "left out", "average"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        ring = 2 * (num_ranks - 1) * row["num_bytes"] / num_ranks
        table.add_row(
            row["method"],
            f"{row['num_bytes'] / row['encode_s'] / 1e9:.2f} GB/s",
            f"{row['num_bytes'] / row['decode_s'] / 1e9:.2f} GB/s",
            f"1/{ring / row['sent_bytes']:.1f}" if row["sent_bytes"] else "nothing",
            f"{row['relative_error']:.1%}",
            f"{row['average_s'] * 1e3:.2f} ms",
        )
    return table
