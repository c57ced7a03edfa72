"""Rules that look at whole updates: Krum, Multi-Krum, Bulyan, the geometric median, clipped norms."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.federated.robust.base import RobustRule, square_distances
from torsh_distributed.federated.robust.by_coordinate import middle

_MOST_STEPS = 100
_TOLERANCE = 1e-9


class Krum(RobustRule):
    """The one update that is nearest to its n - f - 2 nearest others."""

    name = "krum"
    inequality = "n >= 2f + 3"
    _offset = 3

    @override
    def _combine(self, updates: Tensor) -> Tensor:
        return updates[int(_scores(square_distances(updates), self.hostile).argmin())]


class MultiKrum(RobustRule):
    """The mean of the n - f - 2 updates that Krum scores best; with n = 2f + 3 it is of f + 1."""

    name = "multi_krum"
    inequality = "n >= 2f + 3"
    _offset = 3

    @override
    def _combine(self, updates: Tensor) -> Tensor:
        scores = _scores(square_distances(updates), self.hostile)
        return updates[scores.argsort(stable=True)[: len(updates) - self.hostile - 2]].mean(dim=0)


class Bulyan(RobustRule):
    """Of n - 2f updates that Krum chooses one by one, per coordinate the mean of the n - 4f nearest the median."""

    name = "bulyan"
    inequality = "n >= 4f + 3"
    _factor, _offset = 4, 3

    @override
    def _combine(self, updates: Tensor) -> Tensor:
        distances = square_distances(updates)
        left = list(range(len(updates)))
        chosen = []
        for _ in range(len(updates) - 2 * self.hostile):
            best = left[int(_scores(distances[left][:, left], self.hostile).argmin())]
            chosen.append(best)
            left.remove(best)
        kept = updates[chosen]
        nearest = (kept - middle(kept)).abs().argsort(dim=0, stable=True)[: len(chosen) - 2 * self.hostile]
        return kept.gather(0, nearest).mean(dim=0)


class GeometricMedian(RobustRule):
    """The point with the least sum of distances to all updates (Weiszfeld's iteration)."""

    name = "geometric_median"

    @override
    def _combine(self, updates: Tensor) -> Tensor:
        point = middle(updates)
        for _ in range(_MOST_STEPS):
            distances = (updates - point).norm(dim=1).clamp_min(_TOLERANCE)
            weights = (1 / distances) / (1 / distances).sum()
            previous, point = point, weights @ updates
            if float((point - previous).norm()) <= _TOLERANCE * (1 + float(point.norm())):
                break
        return point


class NormClipping(RobustRule):
    """The mean of updates that are shortened to the median length: bounds what each can do, and removes none."""

    name = "norm_clipping"

    @override
    def _combine(self, updates: Tensor) -> Tensor:
        norms = updates.norm(dim=1)
        factors = (middle(norms[:, None]) / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
        shortened: Tensor = updates * factors[:, None]
        return shortened.mean(dim=0)


def _scores(distances: Tensor, hostile: int) -> Tensor:
    """Krum's: the sum of squared distances to the nearest others."""
    num_nearest = max(1, len(distances) - hostile - 2)
    # The first of each row is the distance to itself.
    nearest: Tensor = distances.sort(dim=1).values[:, 1 : 1 + num_nearest]
    return nearest.sum(dim=1)
