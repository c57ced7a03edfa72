"""Options of `torsh run` and `torsh demo` about who looks at the job."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from torsh_distributed import known_variables
from torsh_distributed.observe.settings import LOOPBACK_HOST, ObserveSettings

if TYPE_CHECKING:
    from torsh_distributed.plan import Plan
    from torsh_distributed.plan.sections.green import GreenConfig

DEFAULT_PAGE_PORT = 8080
_PANEL = "Observing"

Dashboard = Annotated[bool, typer.Option("--dashboard", help="Serve a live page of the job.", rich_help_panel=_PANEL)]
DashboardPort = Annotated[
    int,
    typer.Option(min=0, max=65535, help="Port of the page; another if it is taken, 0 for any.", rich_help_panel=_PANEL),
]
PrometheusPort = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="Serve metrics for Prometheus on this node.", rich_help_panel=_PANEL),
]

Green = Annotated[
    bool,
    typer.Option("--green", help="Measure the job's energy, or estimate it and say so.", rich_help_panel=_PANEL),
]


class ObserveOptions(NamedTuple):
    """Who looks at the job."""

    dashboard: Dashboard = False
    dashboard_port: DashboardPort = DEFAULT_PAGE_PORT
    dashboard_host: Annotated[
        str, typer.Option(help="Address of the page. Off loopback it asks for a token.", rich_help_panel=_PANEL)
    ] = LOOPBACK_HOST
    prometheus_port: PrometheusPort = None
    html_report: Annotated[
        Path | None, typer.Option("--html-report", help="Write an HTML report at the end.", rich_help_panel=_PANEL)
    ] = None
    export: Annotated[
        list[str] | None,
        typer.Option(
            "--export",
            help="Send metrics to jsonl:FILE, csv:FILE, tensorboard:DIR, otlp:URL, pushgateway:URL, wandb:PROJECT, "
            "mlflow:URI, energy:FILE. May be repeated.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    alerts: Annotated[
        Path | None,
        typer.Option(
            "--alerts", help="TOML file with rules for alerts; default: those of the library.", rich_help_panel=_PANEL
        ),
    ] = None
    green: Green = False


def observe_settings(plan: "Plan | None", given: ObserveOptions) -> ObserveSettings:
    """What the plan asks for, and the command line on top of it."""
    settings = ObserveSettings() if plan is None else ObserveSettings.from_plan(plan.observe)
    if given.dashboard:
        settings = dataclasses.replace(settings, page_port=given.dashboard_port, page_host=given.dashboard_host)
    if given.prometheus_port is not None:
        settings = dataclasses.replace(settings, prometheus_port=given.prometheus_port)
    if given.html_report is not None:
        settings = dataclasses.replace(settings, report=str(given.html_report))
    if given.export:
        from torsh_distributed.observe.export.registry import check_export

        for text in given.export:
            check_export(text)
        settings = dataclasses.replace(settings, exports=(*settings.exports, *given.export))
    if given.alerts is not None:
        from torsh_distributed.observe.alerts.alert_actions import check_actions
        from torsh_distributed.observe.alerts.alert_rules import read_rules

        check_actions(read_rules(given.alerts)[1])
        settings = dataclasses.replace(settings, alert_rules=str(given.alerts))
    if green_config(plan, wanted=given.green) is not None:
        settings = dataclasses.replace(settings, energy=True)
    return settings


def energy_record(plan: "Plan | None") -> Path | None:
    """Beside the directory of checkpoints, from which a job that is started again goes on; else with the event files.

    Not in the former: it belongs to its checkpoints alone.
    """
    if plan is not None and plan.checkpoint.enabled:
        checkpoints = Path(plan.checkpoint.dir).resolve()
        return checkpoints.with_name(f"{checkpoints.name}.energy.json")
    events_dir = known_variables.text("TORSH_EVENTS_DIR")
    return Path(events_dir).resolve() / "energy-record.json" if events_dir else None


def green_config(plan: "Plan | None", *, wanted: bool) -> "GreenConfig | None":
    """What the energy of a job is measured with: the plan's section, if that or the command line asks for it."""
    if plan is not None and plan.green.enabled:
        return plan.green
    if not wanted:
        return None
    from torsh_distributed.plan.sections.green import GreenConfig

    return GreenConfig(enabled=True) if plan is None else plan.green.replace(enabled=True)
