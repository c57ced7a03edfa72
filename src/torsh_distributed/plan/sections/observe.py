"""Where a run reports to: the `observe` section of a plan."""

from __future__ import annotations

from pydantic import Field

from torsh_distributed.plan.section import Section


class ObserveConfig(Section):
    """Where events and metrics go."""

    events_dir: str | None = Field(default=None, min_length=1)
    """Directory where each rank writes its events as JSON lines. TORSH_EVENTS_DIR does the same for one run."""

    prometheus_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the metrics page, plus the local rank. 9610 is customary. Left out: no page."""

    collection_interval_s: float = Field(default=5.0, gt=0)
    """Seconds between readings of the machine's sensors."""
