"""`torsh trace`: one timeline of all ranks from recorded events, and what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Make timelines of recorded runs, and sum them up.")

RunFolder = Annotated[
    Path, typer.Argument(help="Directory of `torsh run --trace`, or of TORSH_EVENTS_DIR.", exists=True, file_okay=False)
]
LimitMb = Annotated[
    float, typer.Option("--limit-mb", min=0.1, help="Most megabytes; the shortest slices are left out.")
]


@app.command()
def merge(
    run: RunFolder,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The trace; .json or .json.gz. Default: trace.json in RUN.")
    ] = None,
    limit_mb: LimitMb = 200.0,
) -> None:
    """Merge the events of all ranks, and profiles of torch.profiler beside them, into one timeline for Perfetto."""
    typer.echo(merged(run, output or run / "trace.json", limit_mb=limit_mb))


def merged(run: Path, target: Path, *, limit_mb: float) -> str:
    """Write the trace; a line about it."""
    from torsh_distributed.observe.trace.trace_file import write_trace

    found = write_trace(run, target, limit_mb=limit_mb)
    left_out = f", the {found.num_dropped} shortest left out" if found.num_dropped else ""
    profiles = f", {found.num_profiles} profiles of torch joined" if found.num_profiles else ""
    error = f", clocks aligned to ±{found.clock_error_s * 1e6:.0f} µs" if found.clock_error_s else ""
    return (
        f"{found.path}: {found.num_slices} slices of {found.num_ranks} ranks{left_out}, {found.num_links} collectives "
        f"linked{profiles}{error}; open it at https://ui.perfetto.dev"
    )


@app.command()
def summary(run: RunFolder) -> None:
    """Say where the steps of a recorded run went, rank by rank, and who comes late."""
    from torsh_distributed.cli.trace.analysis_text import summary_lines
    from torsh_distributed.observe.bottlenecks.bottleneck import analyse

    typer.echo("\n".join(summary_lines(analyse(run))))
