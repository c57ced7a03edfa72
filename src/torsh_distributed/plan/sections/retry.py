"""How failed operations are retried: the `retry` section of a plan."""

from __future__ import annotations

from pydantic import Field

from torsh_distributed.plan.section import Section


class RetryConfig(Section):
    """Backoff between attempts, with jitter and a total deadline."""

    max_retries: int = Field(default=3, ge=0)
    """Attempts after the first; 0 means one attempt in all."""

    initial_delay_s: float = Field(default=0.1, ge=0)
    """Wait before the first retry."""

    multiplier: float = Field(default=2.0, ge=1)
    """Growth of the wait from one retry to the next, where `exponential` is on."""

    max_delay_s: float = Field(default=10.0, ge=0)
    """Ceiling of a single wait."""

    total_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds for all attempts and waits together; none begins after it."""

    jitter: float = Field(default=0.1, ge=0, le=1)
    """Random share added to or taken from each wait, so that ranks do not return in step."""

    exponential: bool = True
    """Off keeps the wait at `initial_delay_s`."""
