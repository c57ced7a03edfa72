"""`torsh run --trace`: what the workers record, and the timeline made of it at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from torsh_distributed.cli.error_message import print_error
from torsh_distributed.errors import IoError


def trace_variables(trace: Path | None, limit_mb: float, *, num_ranks: int) -> dict[str, str]:
    """What makes the workers record, each within its share of the limit; an event takes about as much as its slice."""
    if trace is None:
        return {}
    return {
        "TORSH_EVENTS_DIR": str((trace / "events").resolve()),
        "TORSH_EVENTS_MAX_MB": str(max(1.0, 2 * limit_mb / num_ranks)),
    }


@contextmanager
def recorded(trace: Path, limit_mb: float, *, arguments: list[str]) -> Iterator[None]:
    """Around the job: how it was started, the launcher's own events, and at the end the timeline."""
    import json
    import os
    import sys

    from torsh_distributed.cli.trace.trace_commands import merged
    from torsh_distributed.events import JsonlSink

    with JsonlSink(trace / "events"):
        variables = {name: value for name, value in os.environ.items() if name.startswith("TORSH_PLAN")}
        how = {"arguments": arguments, "directory": str(Path.cwd()), "variables": variables}
        (trace / "run.json").write_text(json.dumps(how) + "\n")
        yield
    try:
        typer.echo(f"torsh run: {merged(trace, trace / 'trace.json', limit_mb=limit_mb)}", err=True)
        typer.echo(f"torsh run: `torsh why {trace}` says where the time went", err=True)
        _learn(trace)
    except IoError as error:
        # The job's own end is what counts: a script without events has no timeline.
        print_error(error)
        sys.stderr.flush()


def _learn(trace: Path) -> None:
    """Keep how far off the prediction was, if the job made one."""
    files = (trace / "events").glob("rank-0*.jsonl")
    if not any(b'"prediction"' in path.read_bytes() for path in files):
        return  # the planner imports torch, which takes a second
    from torsh_distributed.planner.forecast.run_learning import keep_run

    told = keep_run(trace)
    if told is not None:
        typer.echo(f"torsh run: {told}", err=True)


def own_arguments() -> list[str]:
    """The command line of this `torsh run`, without what asks for a trace: `torsh tune` starts it again."""
    import sys

    given = sys.argv[2:] if sys.argv[1:2] == ["run"] else sys.argv[1:]
    for name in ("--trace", "--trace-limit-mb", "--trace_limit_mb"):
        # The first is ours: options of the script come after it.
        at = next((at for at, one in enumerate(given) if one == name or one.startswith(f"{name}=")), None)
        if at is not None:
            given = given[:at] + given[at + (1 if "=" in given[at] else 2) :]
    return given
