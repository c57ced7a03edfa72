"""What a run tells about itself: the `observe` section of a plan."""

from __future__ import annotations

from pydantic import Field

from torsh_distributed.plan.section import Section


class ObserveConfig(Section):
    """Where events and metrics go."""

    events_dir: str | None = Field(default=None, min_length=1)
    """Directory to which each rank appends its events, as JSON lines. TORSH_EVENTS_DIR does the same for one run."""

    prometheus_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the metrics page; each local rank adds its number. 9610 is customary. Left out: no page."""

    collection_interval_s: float = Field(default=5.0, gt=0)
    """Time between two readings of the machine's sensors."""
