"""`torsh bench machine`: what operations and links of this machine cost, into the file that the planner reads.

Each rank runs this module, all at the same time: ranks that share a machine take memory bandwidth from each other.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError, ProcessFailure
from torsh_distributed.launch.job import launch_job
from torsh_distributed.launch.spec import Entry, EntryKind, JobSpec
from torsh_distributed.launch.worker.init import distributed
from torsh_distributed.planner.machine.codec_rates import measure_codecs
from torsh_distributed.planner.machine.link_measuring import measure_collectives, measure_interference
from torsh_distributed.planner.machine.machine_file import (
    MachineFile,
    Measurement,
    fingerprint,
    machine_path,
    measurement_from,
)
from torsh_distributed.planner.machine.measured_rates import SizeTable
from torsh_distributed.planner.machine.measuring import OperationTimer, measure_operations
from torsh_distributed.planner.machine.node_topology import node_topology

app = typer.Typer(add_completion=False)


@app.command()
def machine(
    ranks: Annotated[str, typer.Option(help="Numbers of local ranks to measure with, by comma.")] = "1,2",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write. Default: where the planner looks."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time for one collective at one size.")] = 0.1,
) -> None:
    """Measure products, attention, memory, launches, the update and links, and keep them for the planner.

    Each number of ranks is measured by itself, all ranks at work at the same time; a plan for so many ranks on this
    machine then uses it. Takes some seconds for each. What recorded runs have taught is forgotten: it
    was about the rates of before.
    """
    counts = _counts(ranks)
    path = output or machine_path()
    known = _known(path)
    for count in counts:
        known[count] = _measured(count, seconds)
        typer.echo(f"measured with {count} rank{'s' if count > 1 else ''}")
    MachineFile(fingerprint(), known).save(path)
    console = Console(highlight=False)
    console.print(_table([known[count] for count in counts]))
    console.print(_codec_table([known[count] for count in counts]))
    for line in _links():
        typer.echo(line)
    typer.echo(f"written to {path}")


def _links() -> list[str]:
    """What the system says of the links that were not measured."""
    found = node_topology()
    links = [("between GPUs", found.between_gpus), ("between nodes", found.between_nodes)]
    lines = [f"{what}: {one.name}, {one.bytes_per_s / 1e9:.1f} GB/s" for what, one in links if one is not None]
    return [f"not measured, as the system says: {'; '.join(lines)}"] if lines else []


def _counts(text: str) -> list[int]:
    found = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in found):
        raise ConfigurationError(f"--ranks {text} is not a list of numbers of ranks", hint="such as 1,2,4")
    return sorted({int(part) for part in found})


def _known(path: Path) -> dict[int, Measurement]:
    """What was measured before on this machine; nothing where that was another one, or cannot be read any more."""
    if not path.exists():
        return {}
    try:
        file = MachineFile.load(path)
    except ConfigurationError as error:
        typer.echo(f"measured again: {error.message}", err=True)
        return {}
    return {} if file.differences() else dict(file.by_ranks)


def _measured(count: int, seconds: float) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="torsh-bench-") as folder:
        out = Path(folder) / "measurement.json"
        args = ("--out", str(out), "--seconds", str(seconds))
        entry = Entry(kind=EntryKind.MODULE, target="torsh_distributed.cli.bench.machine", args=args)
        threads = max(1, (os.cpu_count() or 1) // count)
        exit_code = launch_job(JobSpec(entry=entry, nproc_per_node=count, env={"OMP_NUM_THREADS": str(threads)}))
        if exit_code:
            raise ProcessFailure("measuring the machine failed", exit_code=exit_code, num_ranks=count)
        return measurement_from(json.loads(out.read_text()))


def main() -> None:
    """What every rank runs: measure; rank 0 writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    with distributed():
        count = process_group.world_size()
        timer = OperationTimer(process_group.device(), meet=_meet if count > 1 else lambda: None)
        found = Measurement(
            num_ranks=count,
            date=datetime.date.today().isoformat(),
            rates=measure_operations(timer),
            spread=statistics.median(timer.spreads),
            collectives=measure_collectives(options.seconds) if count > 1 else {},
            interference=measure_interference() if count > 1 else None,
            codecs=measure_codecs(timer),
        )
        if process_group.rank() == 0:
            options.out.write_text(json.dumps(asdict(found)))


def _meet() -> None:
    dist.barrier()


def _table(measured: list[Measurement]) -> Table:
    table = Table(title="measured on this machine; spread: of a typical point")
    for name in ("", *(f"{one.num_ranks} rank{'s' if one.num_ranks > 1 else ''}" for one in measured)):
        table.add_column(name, justify="left" if not name else "right")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    for dtype in measured[0].rates.products:
        sides = measured[0].rates.products[dtype].sides
        for side in sides:
            rates = [one.rates.products[dtype].rate(side, side, side) for one in measured]
            row(f"{dtype} products of {side} × {side}", *(f"{rate / 1e9:,.1f} GFLOP/s" for rate in rates))
    for family in measured[0].rates.families:
        tables = [one.rates.families[family] for one in measured]
        row(f"{family}, large", *(f"{one.sizes[-1] / one.seconds[-1] / 1e9:.2f} GB/s" for one in tables))
    updates = [one.rates.update for one in measured]
    row("update of AdamW, parameters", *(f"{one.sizes[-1] / one.seconds[-1] / 1e9:.2f} GB/s" for one in updates))
    row("what autograd adds to an operation", *(f"{one.rates.launch_s * 1e6:.1f} µs" for one in measured))
    for op in measured[-1].collectives:
        taken = [one.collectives.get(op) for one in measured]
        row(f"{op}, small", *("" if one is None else f"{one.seconds[0] * 1e6:.0f} µs" for one in taken))
        row(
            f"{op}, large",
            *("" if one is None else f"{one.sizes[-1] / one.seconds[-1] / 1e9:.2f} GB/s" for one in taken),
        )
    both = [one.interference for one in measured]
    row("computing beside an all-reduce", *("" if one is None else f"{one.compute_slowdown:.2f} ×" for one in both))
    row(
        "an all-reduce beside computing",
        *("" if one is None else f"{one.communication_slowdown:.2f} ×" for one in both),
    )
    row("of the shorter one is free", *("" if one is None else f"{one.overlap:.0%}" for one in both))
    row("spread", *(f"{one.spread:.0%}" for one in measured))
    return table


def _codec_table(measured: list[Measurement]) -> Table:
    """Large gradients: GB/s of the gradient's bytes."""
    table = Table(title="compressing large gradients, GB/s: encoded, decoded, and averaged over all ranks")
    table.add_column("method")
    table.add_column("sent", justify="right")
    for one in measured:
        table.add_column(f"{one.num_ranks} rank{'s' if one.num_ranks > 1 else ''}", justify="right")
    for method, first in measured[0].codecs.items():
        rates = [one.codecs.get(method) for one in measured]
        cells = (
            ""
            if rate is None
            else " · ".join(_large_rate(part) for part in (rate.encode, rate.decode, rate.average) if part)
            for rate in rates
        )
        table.add_row(method, f"{first.share:.1%}", *cells)
    return table


def _large_rate(table: SizeTable) -> str:
    return f"{table.sizes[-1] / table.seconds[-1] / 1e9:.2f}"


if __name__ == "__main__":
    main()
