"""Where a run reports to: the `observe` section of a plan."""

from __future__ import annotations

from pydantic import Field

from torsh_distributed.plan.section import Section, Words


class ObserveConfig(Section):
    """Where events and metrics go. Nothing is measured unless one of these is set."""

    events_dir: str | None = Field(default=None, min_length=1)
    """Directory where each rank writes its events as JSON lines. TORSH_EVENTS_DIR does the same for one run."""

    prometheus_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the metrics page, one for each node, served by `torsh run`. 9610 is customary. Without `torsh run` each
    rank has its own, at the port plus its local rank. Left out: no page."""

    prometheus_host: str = Field(default="127.0.0.1", min_length=1)
    """Address that the metrics page listens on. Loopback serves this machine alone; 0.0.0.0 everyone who reaches it."""

    dashboard_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the live page for people, on node 0; 0 takes a free one. Left out: no page."""

    dashboard_host: str = Field(default="127.0.0.1", min_length=1)
    """Address that the live page listens on. Off loopback it asks for the token that is in the printed address."""

    report: str | None = Field(default=None, min_length=1)
    """File for an HTML report at the end of the job."""

    exports: Words = ()
    """Where metrics go besides, each `kind:target`: jsonl:FILE, csv:FILE, tensorboard:DIRECTORY, otlp:URL,
    pushgateway:URL, wandb:PROJECT, mlflow:URI, energy:FILE."""

    alert_rules: str | None = Field(default=None, min_length=1)
    """TOML file with rules for alerts; `default` for those that come with the library."""

    collection_interval_s: float = Field(default=5.0, gt=0)
    """Seconds between readings of the machine's sensors."""
