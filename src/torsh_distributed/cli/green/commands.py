"""`torsh green report` and `torsh green when`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Say what runs cost in energy and CO2, and when to run."
)


@app.callback()
def _group() -> None:
    """Say what runs cost in energy and CO2, and when to run."""


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Event files of a run that was started with --green.")],
    json: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON here; - prints it.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as a page here.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the course over time as CSV here.")] = None,
    pue: Annotated[float, typer.Option(min=1.0, help="Power usage effectiveness of the building.")] = 1.0,
    offset_kg: Annotated[float, typer.Option(min=0.0, help="Kilograms of CO2 that were offset.")] = 0.0,
    target: Annotated[
        float | None, typer.Option(help="Samples per joule that count as efficient, for the score.")
    ] = None,
    market_g_per_kwh: Annotated[
        float | None, typer.Option(min=0.0, help="Grams a kilowatt-hour of the power that was bought.")
    ] = None,
    max_kwh: Annotated[float | None, typer.Option(min=0.0, help="Exit with code 1 above this energy.")] = None,
    max_co2_kg: Annotated[
        float | None, typer.Option(min=0.0, help="Exit with code 1 above this CO2, or if it is not known.")
    ] = None,
) -> None:
    """Say what a run cost: energy and CO2 by cause, with formulae and sources."""
    import csv as csv_format
    import json as json_format

    from rich.console import Console
    from rich.table import Table

    from torsh_distributed.green.report.report_page import report_page
    from torsh_distributed.green.report.run_report import TREND_COLUMNS, run_report
    from torsh_distributed.observe.job.run_files import EventFiles

    view = EventFiles(run).read_all()
    found = run_report(
        view, pue=pue, offset_kg=offset_kg, target_samples_per_j=target, market_g_per_kwh=market_g_per_kwh
    )
    if csv is not None:
        with csv.open("w", newline="", encoding="utf-8") as file:
            rows = csv_format.DictWriter(file, TREND_COLUMNS)
            rows.writeheader()
            rows.writerows(found.trend)
        typer.echo(f"report: {csv}", err=True)
    exit_code = 0
    for name, most in (("total_kwh", max_kwh), ("co2_kg", max_co2_kg)):
        value = found.value(name)
        if most is not None and (value is None or value > most):
            typer.echo(
                f"above the limit: {name} is {'not known' if value is None else f'{value:.5g}'}, of {most:g}", err=True
            )
            exit_code = 1
    text = json_format.dumps(found.to_dict(), indent=2)
    if html is not None:
        html.write_text(report_page(found), encoding="utf-8")
        typer.echo(f"report: {html}", err=True)
    if json == Path("-"):
        typer.echo(text)
        raise typer.Exit(exit_code)
    if json is not None:
        json.write_text(text + "\n", encoding="utf-8")
        typer.echo(f"report: {json}", err=True)
    table = Table("figure", "value", "", "how", title=f"energy of {found.run_id}, {found.label}", title_justify="left")
    table.columns[1].justify = "right"
    for figure in found.figures:
        shown = "not known" if figure.value is None else f"{figure.value:.5g}"
        table.add_row(figure.name, shown, figure.unit, figure.formula)
    console = Console()
    console.print(table)
    for line in (*found.sources, *found.notes):
        console.print(f"- {line}", highlight=False)
    raise typer.Exit(exit_code)


@app.command()
def when(
    deadline: Annotated[str, typer.Option(help="When it must be done: 96h, 4d, or a time such as 2026-11-20T18:00Z.")],
    hours: Annotated[float, typer.Option(min=0.1, help="How long it takes with one worker.")] = 1.0,
    zone: Annotated[str | None, typer.Option(help="GB, or a zone of the feed.")] = None,
    source: Annotated[str, typer.Option(help="gb, electricity_maps, watttime or file.")] = "gb",
    file: Annotated[Path | None, typer.Option(help="CSV with time,g_per_kwh; the source is then this file.")] = None,
    url: Annotated[str | None, typer.Option(help="Address of the feed instead of its own.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Most workers.")] = 1,
    efficiency: Annotated[float, typer.Option(min=0.01, max=1.0, help="What each further worker adds.")] = 0.9,
    watts: Annotated[float, typer.Option(min=1.0, max=1e9, help="Power of a worker that trains.")] = 1000.0,
    idle_watts: Annotated[float, typer.Option(min=0.0, help="Power of one that waits and is held.")] = 0.0,
    renewable: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="List the times with a renewable share above this, too.")
    ] = 0.4,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say when to run a job so that it is done in time with the least CO2, and what that saves."""
    import json as json_format
    import time

    from torsh_distributed.green.carbon.feeds import make_feed
    from torsh_distributed.green.schedule.allocation import JobShape
    from torsh_distributed.green.schedule.run_times import read_deadline, recommend

    now = time.time()
    until = read_deadline(deadline, now=now)
    feed = make_feed(
        "file" if file is not None else source,
        zone=zone,
        file=None if file is None else str(file),
        url=url,
        g_per_kwh=None,
    )
    speeds = tuple(1.0 + efficiency * number for number in range(workers))
    job = JobShape(work_h=hours, speeds=speeds, busy_w=watts, idle_w=idle_watts)
    found = recommend(job, feed, now=now, until=until, renewable_above=renewable)
    typer.echo(json_format.dumps(found.to_dict()) if json else found.in_words())
