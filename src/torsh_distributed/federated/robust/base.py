"""What replaces the mean where some clients may be hostile."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor

from torsh_distributed.errors import ConfigurationError


class RobustRule(ABC):
    """Combines updates of which up to `hostile` may be anything.

    Clients count equally: a number of samples is a claim. `mixing` first replaces each update by the mean of its
    nearest n - f, itself included; without it, rules that choose single updates lose accuracy where clients' data
    differ (NNM, Allouah et al., 2023).
    """

    name: ClassVar[str]
    inequality: ClassVar[str] = "n >= 2f + 1"
    _factor: ClassVar[int] = 2
    _offset: ClassVar[int] = 1

    def __init__(self, *, hostile: int, mixing: bool = False) -> None:
        if hostile < 0:
            raise ConfigurationError("the number of hostile clients must not be negative", hostile=hostile)
        self.hostile = hostile
        self.mixing = mixing

    @property
    def fewest(self) -> int:
        """The fewest updates with which the rule holds."""
        return self._factor * self.hostile + self._offset

    def combine(self, updates: Tensor) -> Tensor:
        """From (n, numel) to (numel,). Values are finite; what is not was refused before."""
        self.require(len(updates))
        values = updates.to(torch.float64)
        if self.mixing and self.hostile:
            values = nearest_means(values, len(values) - self.hostile)
        return self._combine(values).to(updates.dtype)

    def require(self, num_updates: int) -> None:
        """Raise ConfigurationError if so few updates cannot outvote the hostile ones."""
        if num_updates < self.fewest:
            raise ConfigurationError(
                f"{self.name} needs {self.inequality}: with f = {self.hostile} that is {self.fewest} updates, "
                f"and n = {num_updates}",
                hint="ask more clients (clients_per_round, min_clients), or expect fewer hostile ones",
            )

    def without(self, num_refused: int) -> Self:
        """The rule for a round in which so many updates were refused: so many hostile clients are out already.

        The inequality holds on: with each of them n is one less, and f, which counts twice or more, too.
        """
        rule = copy.copy(self)
        rule.hostile = max(0, self.hostile - num_refused)
        return rule

    @abstractmethod
    def _combine(self, updates: Tensor) -> Tensor:
        """The rule itself, in float64."""


def square_distances(updates: Tensor) -> Tensor:
    """(n, n). By differences: products would lose the digits that tell near updates apart."""
    return torch.cdist(updates, updates, compute_mode="donot_use_mm_for_euclid_dist").square()


def nearest_means(updates: Tensor, count: int) -> Tensor:
    """Each update replaced by the mean of its `count` nearest, itself included."""
    nearest = square_distances(updates).argsort(dim=1, stable=True)[:, :count]
    return torch.stack([updates[row].mean(dim=0) for row in nearest])
