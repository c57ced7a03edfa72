"""Rounds that wait for nobody (FedBuff, Nguyen et al., 2022): so many updates are a step, from whatever model.

    x <- step(x, sum of p_i s(t_i) delta_i)        s(t) = (1 + t) ** -exponent

t_i is the update's staleness: how many steps the model has taken since its client got it. p_i are the shares that a
round gives its clients; s is not part of the mean's denominator, so a buffer of stale updates moves the model less.
"""

from __future__ import annotations

from dataclasses import dataclass

from torsh_distributed.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncBuffer:
    """`clients_per_round` clients are at work at any time; who delivers is replaced by another client at once."""

    size: int = 10
    """K: how many updates make a step of the model."""

    staleness_exponent: float = 0.5
    """How fast updates lose weight with their staleness. 0.5 is FedBuff's 1 / sqrt(1 + t); 0 weights all alike."""

    max_staleness: int | None = None
    """Updates that are older do not count; None: all do."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigurationError("the size of a buffer must be at least 1", size=self.size)
        if self.staleness_exponent < 0:
            raise ConfigurationError(
                "staleness_exponent must not be negative: stale updates would weigh more",
                staleness_exponent=self.staleness_exponent,
            )
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ConfigurationError("max_staleness must not be negative", max_staleness=self.max_staleness)

    def scale(self, staleness: int) -> float:
        """What an update is multiplied with; 0: it is too old to count."""
        if self.max_staleness is not None and staleness > self.max_staleness:
            return 0.0
        return float((1 + staleness) ** -self.staleness_exponent)

    def too_old(self, staleness: int) -> str:
        """Why an update does not count."""
        return f"its model is {staleness} steps old, and max_staleness is {self.max_staleness}"
