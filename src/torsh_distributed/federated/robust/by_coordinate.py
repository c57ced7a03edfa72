"""Rules that look at each coordinate by itself: median, trimmed mean."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.federated.robust.base import RobustRule


class Median(RobustRule):
    """The middle value of each coordinate; of an even number, the mean of both."""

    name = "median"

    @override
    def _combine(self, updates: Tensor) -> Tensor:
        return middle(updates)


class TrimmedMean(RobustRule):
    """Per coordinate the mean without the f largest and the f smallest values."""

    name = "trimmed_mean"
    inequality = "n > 2f"

    @override
    def _combine(self, updates: Tensor) -> Tensor:
        ordered = updates.sort(dim=0).values
        return ordered[self.hostile : len(ordered) - self.hostile].mean(dim=0)


def middle(updates: Tensor) -> Tensor:
    """The median of each coordinate."""
    ordered = updates.sort(dim=0).values
    count = len(ordered)
    return torch.stack([ordered[(count - 1) // 2], ordered[count // 2]]).mean(dim=0)
