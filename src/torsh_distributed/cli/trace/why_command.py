"""`torsh why`: why a recorded run is slow, and what would make it faster."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from typing import Annotated

import typer

from torsh_distributed.cli.trace.trace_commands import RunFolder

app = typer.Typer(add_completion=False)


@app.command()
def why(
    run: RunFolder, json: Annotated[bool, typer.Option("--json", help="Answer as one JSON object.")] = False
) -> None:
    """Say why a recorded run is slow, with the evidence, and what to change, with the gain that follows from it."""
    from torsh_distributed.cli.trace.trace_commands import bottleneck_lines, recommendation_lines, summary_lines
    from torsh_distributed.observe.bottlenecks.bottleneck import analyse
    from torsh_distributed.observe.bottlenecks.measured_gains import measured_gains
    from torsh_distributed.observe.bottlenecks.recommendation import recommend

    found = analyse(run)
    advice, measured = recommend(found), measured_gains(run)
    if json:
        report = {
            "analysis": asdict(found),
            "recommendations": [asdict(one) for one in advice],
            "measured_gains": [asdict(one) for one in measured],
        }
        typer.echo(json_format.dumps(report, indent=2))
        return
    for title, lines in (
        ("Where the time goes", summary_lines(found)),
        ("What holds it up", bottleneck_lines(found)),
        ("What to do", recommendation_lines(advice, found.step_s, measured)),
    ):
        typer.echo("\n".join([title, *(f"  {line}" for line in lines), ""]))
