"""One failure of a run: what failed, what was done, how long it took."""

from __future__ import annotations

from dataclasses import dataclass

from torsh_distributed.events import IncidentStatus

SAME_S = 5.0
"""Ranks that report the same failure of the same step within this time report one incident."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One failure, as one rank or several report it."""

    names: tuple[str, ...]
    failure: str
    action: str
    ranks: tuple[int, ...]
    step: int | None
    opened_at: float
    status: IncidentStatus
    """open if no end was reported: the process ended first, or the run still is in it."""
    duration_s: float | None
    """Until a step was completed again, or the action was given up."""
    detail: str | None
