"""What a parameter server has done, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from torsh_distributed.rpc.serving.exposed import sendable


@sendable
@dataclass(frozen=True, kw_only=True, slots=True)
class ServerStats:
    """What a server has done since it started, and what it holds."""

    version: int
    num_parameters: int
    """Elements, of all tensors."""
    num_bytes: int
    """With the optimizer's state and publications."""
    workers: list[str]
    num_pushes: int
    num_repeated: int
    """Pushes that were sent again although they were in the parameters already."""
    num_pulls: int
    num_refused: int
    apply_s: float
    """Seconds spent on steps of the optimizer."""
    publication: int
    mean_staleness: float
    """Versions between the one that a gradient was computed from and the one that it was applied to."""
    max_staleness: int
    max_lead: int
    """The most pushes that a worker was ahead of the slowest when it went on."""
    received_bytes: int
    """Gradients, as they travelled."""
    sent_bytes: int
    """Parameters, as they travelled."""


@dataclass(kw_only=True)
class ServerCounts:
    """The part of it that is counted. One thread at a time."""

    num_pushes: int = 0
    num_repeated: int = 0
    num_pulls: int = 0
    num_refused: int = 0
    apply_s: float = 0.0
    max_staleness: int = 0
    max_lead: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    _sum_staleness: int = 0
    _num_based: int = 0

    def applied(self, version: int, base: int | None) -> None:
        """A gradient computed from version `base` was applied to `version`."""
        self.num_pushes += 1
        if base is not None:
            self._num_based += 1
            self._sum_staleness += version - base
            self.max_staleness = max(self.max_staleness, version - base)

    @property
    def mean_staleness(self) -> float:
        """Of the pushes that said what they were computed from."""
        return self._sum_staleness / self._num_based if self._num_based else 0.0
