"""`torsh metrics`: what is measured, and a dashboard of Grafana made from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def metrics(
    grafana: Annotated[Path | None, typer.Option(help="Write a dashboard for Grafana to this file.")] = None,
    alerts: Annotated[
        Path | None,
        typer.Option(help="Print the rules of this TOML file, or `default`, as alerting rules of Prometheus."),
    ] = None,
) -> None:
    """Say what is measured; make a Grafana dashboard."""
    from torsh_distributed.observe.export.grafana_dashboard import grafana_dashboard
    from torsh_distributed.observe.metrics.catalogue import CATALOGUE

    if grafana is not None:
        grafana.write_text(json.dumps(grafana_dashboard(), indent=2) + "\n")
        typer.echo(f"dashboard: {grafana}")
        return
    if alerts is not None:
        from torsh_distributed.observe.alerts.alert_rules import prometheus_rules, read_rules

        typer.echo(prometheus_rules(read_rules(alerts)[0]), nl=False)
        return
    for definition in CATALOGUE.values():
        labels = ", ".join((definition.scope.value, *definition.labels))
        typer.echo(f"{definition.name} ({definition.kind.value}; {labels}): {definition.help}")
