"""How failed operations are tried again: the `retry` section of a plan."""

from __future__ import annotations

from pydantic import Field

from torsh_distributed.plan.section import Section


class RetryConfig(Section):
    """Backoff between attempts, with jitter and a total deadline; and a break after many failures.

    For what one rank does alone: questions to the store, remote checkpoints, checkpoints after a full disk. A
    collective is never repeated by one rank.
    """

    max_retries: int = Field(default=3, ge=0)
    """Attempts after the first one; 0 means a single attempt."""

    initial_delay_s: float = Field(default=0.1, ge=0)
    """Seconds to wait before the first retry."""

    multiplier: float = Field(default=2.0, ge=1)
    """Factor from one wait to the next, if `exponential` is on."""

    max_delay_s: float = Field(default=10.0, ge=0)
    """Longest single wait."""

    total_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds for all attempts and waits together; no attempt starts after that."""

    jitter: float = Field(default=0.1, ge=0, le=1)
    """Random share added to or subtracted from each wait, so ranks do not retry in lockstep."""

    exponential: bool = True
    """Off keeps the wait at `initial_delay_s`."""

    failure_threshold: int = Field(default=5, ge=1)
    """Failures of remote storage within `failure_window_s` after which nothing is tried for `break_s`: files that are
    still to be transferred then fail at once instead of waiting each for its own timeout."""

    failure_window_s: float = Field(default=60.0, gt=0)
    """Seconds that a failure counts."""

    break_s: float = Field(default=30.0, gt=0)
    """Seconds without attempts; then one is made to see whether the service is back."""

    success_threshold: int = Field(default=3, ge=1)
    """Successes in a row after a break until failures are counted from 0 again; one failure before starts the next."""
