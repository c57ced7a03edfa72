"""The energy of a job in numbers and in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torsh_distributed.events import ScheduleEvent


@dataclass(frozen=True, slots=True)
class MeterRow:
    """One meter of a node."""

    node: int
    meter: str
    source: str
    is_measured: bool
    joules: float
    newest_w: float
    detail: str | None
    mean_w: float = 0.0
    peak_w: float = 0.0
    """Most over one interval."""
    utilization: float | None = None
    """Mean share of time in which it computed; None where it does not tell."""
    peak_celsius: float | None = None
    shared_j: float = 0.0
    """Counted while other jobs computed on it too."""
    num_others: int = 0
    """Most processes of other jobs at once."""
    own_share: float | None = None
    """This job's part of the computing time then; None where the driver does not tell."""


@dataclass(slots=True)
class EpochEnergy:
    """What was counted while ranks were in an epoch."""

    joules: float = 0.0
    grams: float = 0.0
    ungraded_j: float = 0.0
    """The part without an intensity: in no gram."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergySummary:
    """What a job has spent, and on what: steps, start, failures, undone, skipped, held and other are the total."""

    total_j: float
    measured_j: float
    """The part that meters counted; the rest is estimated."""
    begin: float
    """Seconds since the epoch."""
    duration_s: float
    mean_w: float
    peak_w: float
    """Most over one interval of the meters."""
    idle_w: float | None
    """The least over one interval: what the nodes take while nothing runs on them, or a bound of it from above."""
    idle_j: float | None
    """Idle power × time: part of everything else."""
    steps_j: float
    """Steps that count, with what they waited."""
    waiting_j: float | None
    """Of these, the share of time that ranks waited for each other; None where that is not measured."""
    start_j: float
    """Before the first step."""
    failures_j: float
    """Between the last step before a failure and the first after it."""
    undone_j: float
    """Steps that were lost in a failure and done again."""
    skipped_j: float
    """Steps whose gradients overflowed."""
    held_j: float
    """While the policy on energy let the job wait."""
    other_j: float
    """Between and after steps: evaluation, checkpoints, the end."""
    num_steps: int
    num_samples: int
    grams: float | None
    """CO2 at the intensity of each interval; None if no intensity was known."""
    ungraded_j: float
    """Energy of intervals without an intensity: no part of the grams."""
    renewable_share: float | None = None
    """Of the energy for which the feed told it."""
    predicted_j: float | None = None
    """At the end of the job, at the present rate; None where the number of steps is not known."""
    predicted_error_j: float | None = None
    """Two standard errors of the rest."""
    meters: tuple[MeterRow, ...] = ()
    by_rank: dict[int, float] = field(default_factory=dict)
    by_epoch: dict[int, EpochEnergy] = field(default_factory=dict)
    """Of `torsh run`; empty where nobody told the epochs."""
    carbon: dict[str, Any] | None = None
    schedule: dict[str, Any] | None = None
    """What the policy on energy decided last."""
    budgets: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def estimated_j(self) -> float:
        """The part that no meter counted."""
        return self.total_j - self.measured_j

    @property
    def wasted_j(self) -> float:
        """Failures: the way back and what was done again; and skipped steps."""
        return self.failures_j + self.undone_j + self.skipped_j

    @property
    def joules_per_step(self) -> float | None:
        """Of steps that count."""
        return self.steps_j / self.num_steps if self.num_steps else None

    @property
    def joules_per_sample(self) -> float | None:
        """Everything the job took, over the samples that are in the model."""
        return self.total_j / self.num_samples if self.num_samples else None

    @property
    def label(self) -> str:
        """measured, estimated, or how much of it is."""
        if self.measured_j >= self.total_j:
            return "measured"
        return "estimated" if self.measured_j <= 0 else f"{self.measured_j / self.total_j:.0%} measured, rest estimated"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            **asdict(self),
            "by_rank": {str(rank): joules for rank, joules in self.by_rank.items()},
            "by_epoch": {str(epoch): asdict(one) for epoch, one in self.by_epoch.items()},
            "estimated_j": self.estimated_j,
            "wasted_j": self.wasted_j,
            "joules_per_step": self.joules_per_step,
            "joules_per_sample": self.joules_per_sample,
            "label": self.label,
        }

    def in_words(self) -> str:
        """One line, for the end of a run."""
        parts = [f"{shown_joules(self.total_j)} ({self.label}) in {self.duration_s:.0f} s, mean {self.mean_w:.0f} W"]
        if self.joules_per_sample is not None:
            parts.append(f"{shown_joules(self.joules_per_sample)} a sample")
        if self.joules_per_step is not None:
            parts.append(f"{shown_joules(self.joules_per_step)} a step")
        if self.wasted_j > 0:
            parts.append(f"{shown_joules(self.wasted_j)} lost to failures and skipped steps")
        if self.held_j > 0:
            parts.append(f"{shown_joules(self.held_j)} while it held")
        if self.grams is not None:
            parts.append(f"{shown_grams(self.grams)} CO2")
        return "; ".join(parts)


def schedule_text(event: ScheduleEvent) -> str:
    """A decision of the policy on energy, for people."""
    workers = f" with {event.workers} worker{'' if event.workers == 1 else 's'}" if event.workers else ""
    return f"{event.action}{workers}: {event.reason}"


def shown_joules(joules: float) -> str:
    """Joules in the unit that people read."""
    if joules >= 3.6e6:
        return f"{joules / 3.6e6:.3g} kWh"
    if joules >= 3.6e5:
        return f"{joules / 3.6e3:.3g} Wh"
    return f"{joules / 1e3:.3g} kJ" if joules >= 1e3 else f"{joules:.3g} J"


def shown_grams(grams: float) -> str:
    """Grams, or kilograms of many."""
    return f"{grams / 1e3:.3g} kg" if grams >= 1e3 else f"{grams:.3g} g"
