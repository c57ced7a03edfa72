"""`torsh incidents`: what failed in a run, what was done about it, how often and how long; and what may fail next."""

from __future__ import annotations

import dataclasses
import json as json_format
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from torsh_distributed.terminal_text import neutral

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

EventsDir = Annotated[Path, typer.Argument(help="Directory of the run's events (TORSH_EVENTS_DIR).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def incidents(directory: EventsDir, json: Json = False) -> None:
    """Show the incidents of a run: failures, actions, times to failure and to recovery; and ranks at risk."""
    from torsh_distributed.elastic.incidents.incident_history import (
        failure_statistics,
        observed_seconds,
        read_incidents,
    )
    from torsh_distributed.observe.job.rank_risk import recorded_alarms

    found = read_incidents(directory)
    risks = recorded_alarms(directory)
    numbers = failure_statistics(found, observed_s=observed_seconds(directory))
    if json:
        record = {
            "incidents": [dataclasses.asdict(one) for one in found],
            "statistics": {kind: dataclasses.asdict(one) for kind, one in numbers.items()},
            "risks": [dataclasses.asdict(one) for one in risks],
        }
        typer.echo(json_format.dumps(record, indent=1))
        return
    for risk in risks:
        typer.echo(neutral(f"{_clock(risk.time)} rank {risk.rank}: risk {risk.score:.2f}, {risk.detail}"))
    if not found:
        typer.echo("no incidents")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("when", "failure", "ranks", "step", "action", "status", "took")
    for one in found:
        took = "" if one.duration_s is None else f"{one.duration_s:.2f} s"
        ranks = ", ".join(map(str, one.ranks))
        table.add_row(
            _clock(one.opened_at),
            neutral(one.failure),
            ranks,
            "" if one.step is None else str(one.step),
            neutral(one.action),
            neutral(one.status),
            took,
        )
    summary = Table("failure", "incidents", "resolved", "mean time to failure", "mean time to recovery")
    for kind, stats in numbers.items():
        summary.add_row(
            neutral(kind),
            str(stats.num_incidents),
            str(stats.num_resolved),
            _seconds(stats.mean_time_to_failure_s),
            _seconds(stats.mean_time_to_recovery_s),
        )
    console = Console(markup=False)
    console.print(table)
    console.print(summary)


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%H:%M:%S")


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
