"""The weighted mean of updates, formed as they arrive: the server keeps one vector, not one for each client.

Sums are in float64, so neither the order of arrival nor the number of workers shows in the float32 result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from torsh_distributed.federated.local_training import ClientUpdate


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanUpdate:
    """What a round's updates come to."""

    delta: Tensor
    num_updates: int
    step_norm: float = 0.0
    """Weighted mean of the clients' step norms."""
    extras: dict[str, Tensor] = field(default_factory=dict)


class UpdateSum:
    """Adds updates with weights; several sums of one round can be merged."""

    def __init__(self) -> None:
        self._vectors: dict[str, Tensor] = {}
        self._weight = self._step_norm = 0.0
        self.num_updates = 0

    def add(self, update: ClientUpdate, vector: Tensor, weight: float) -> None:
        """`vector` stands for the update's delta: a strategy may have scaled it, privacy have clipped it."""
        for name, values in {"": vector, **update.extras}.items():
            self._add_vector(name, values, weight)
        self._weight += weight
        self._step_norm += weight * update.step_norm
        self.num_updates += 1

    @property
    def weight(self) -> float:
        """Of all updates together."""
        return self._weight

    def merge(self, other: UpdateSum) -> None:
        """Add what another process has summed."""
        for name, total in other._vectors.items():
            self._add_vector(name, total, 1.0)
        self._weight += other._weight
        self._step_norm += other._step_norm
        self.num_updates += other.num_updates

    def _add_vector(self, name: str, values: Tensor, weight: float) -> None:
        total = self._vectors.get(name)
        if total is None:
            self._vectors[name] = values.to(torch.float64, copy=True).mul_(weight)
        else:
            total.add_(values, alpha=weight)

    def mean(self, dtype: torch.dtype) -> MeanUpdate:
        """Of what was added, at least one update."""
        means = {name: (total / self._weight).to(dtype) for name, total in self._vectors.items()}
        return MeanUpdate(
            delta=means.pop(""),
            num_updates=self.num_updates,
            step_norm=self._step_norm / self._weight,
            extras=means,
        )

    def total(self, like: Tensor) -> Tensor:
        """The sum itself, in float64; zeros if nothing was added."""
        return self._vectors.get("", torch.zeros_like(like, dtype=torch.float64))

    @classmethod
    def of(cls, total: Tensor, weight: float, num_updates: int) -> Self:
        """A sum of updates that was formed elsewhere, already weighted."""
        return cls.from_state([{"": total}, float(weight), 0.0, num_updates])

    def state(self) -> list[Any]:
        """Plain values, to send it."""
        return [self._vectors, self._weight, self._step_norm, self.num_updates]

    @classmethod
    def from_state(cls, state: list[Any]) -> Self:
        """The sum that another process sent."""
        total = cls()
        total._vectors, total._weight, total._step_norm, total.num_updates = state
        return total
