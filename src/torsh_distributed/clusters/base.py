"""What every engine that runs jobs elsewhere can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torsh_distributed.clusters.submission import Submission


class JobState(StrEnum):
    """Where a submitted job stands, in words that all engines share."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """The engine does not know the job, or not any more."""

    @property
    def is_over(self) -> bool:
        """Whether nothing of the job runs or will run."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """One look at a job."""

    state: JobState
    detail: str = ""
    """The engine's own word for it: why it waits, what ended it."""

    exit_code: int | None = None
    """Of the job as a whole, as `torsh run` would return it; None while it runs or if nobody knows."""


class ClusterEngine(Protocol):
    """One kind of cluster.

    Jobs are known by the engine's own id (a SLURM job id, a Ray submission id), so that any process can ask for a job
    that another one submitted. Every call has a deadline and raises a TorshError that says what is missing.
    """

    def render(self, submission: Submission) -> str:
        """What `submit` would hand over, for a person to read; asks nobody."""

    def submit(self, submission: Submission) -> str:
        """Hand the job over and return its id. All of it, or nothing is left behind."""

    def found_at(self) -> dict[str, str]:
        """The options that lead to the same cluster later, if `submit` looked for it: by then there may be another."""
        return {}

    def status(self, job_id: str) -> JobStatus:
        """Where the job stands now."""

    def logs(self, job_id: str, *, follow: bool = False) -> Iterator[str]:
        """The output of all ranks line by line; with `follow` until the job is over."""

    def cancel(self, job_id: str) -> None:
        """End the job; returns when nothing of it runs. A job that is over already is left alone."""

    def scale(self, job_id: str, workers: int) -> None:
        """Change the size of an elastic job; FeatureNotAvailable where the engine cannot."""
