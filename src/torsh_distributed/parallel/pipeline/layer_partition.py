"""Divides layers into stages: the linear partition problem, solved exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torsh_distributed.errors import ConfigurationError


def partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """The first layer of each stage such that the most expensive stage costs as little as possible; no stage is empty.

    Minimises the maximum over stages of the sum of costs by dynamic programming: O(layers² × stages). Among equally
    good cuts it takes the one with the smallest sum of squares.
    """
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise ConfigurationError(
            f"{num_stages} stages need as many layers, but the model has {num_layers}",
            hint=f"lower mesh.pp or pipeline.stages_per_rank: their product may be at most {num_layers}",
            num_stages=num_stages,
            num_layers=num_layers,
        )
    sums = [0.0, *itertools.accumulate(costs)]
    # best[last]: cost of the first `last` layers in as many stages as rounds so far; begins: start of the last stage.
    best = [(sums[last], sums[last] ** 2) for last in range(num_layers + 1)]
    begins: list[list[int]] = [[0] * (num_layers + 1)]
    for stage in range(1, num_stages):
        found = [(math.inf, math.inf)] * (num_layers + 1)
        begin = [0] * (num_layers + 1)
        for last in range(stage + 1, num_layers + 1):
            for first in range(stage, last):
                own = sums[last] - sums[first]
                option = (max(best[first][0], own), best[first][1] + own**2)
                if option < found[last]:
                    found[last], begin[last] = option, first
        best = found
        begins.append(begin)
    starts, last = [], num_layers
    for begin in reversed(begins):
        last = begin[last]
        starts.append(last)
    return tuple(reversed(starts))
