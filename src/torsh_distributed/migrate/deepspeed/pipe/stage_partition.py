"""How layers become stages: by number, by parameters, or by the layers whose class matches a pattern."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """The first item of each part, and the number of items at the end; the first parts take what is left over."""
    size, rest = divmod(num_items, num_parts)
    return [0, *itertools.accumulate(size + (part < rest) for part in range(num_parts))]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """As `partition_uniform`, with parts whose heaviest and lightest differ least.

    For every number of items and parts the best cut so far is kept with its heaviest and lightest part; of equally good
    cuts the one with the shorter last part wins.
    """
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    sums = [0.0, *itertools.accumulate(weights)]
    best: dict[tuple[int, int], tuple[float, float, list[int]]] = {(0, 0): (0.0, float("inf"), [0])}
    for parts in range(1, num_parts + 1):
        for end in range(parts, len(weights) + 1):
            spread = float("inf")
            for start in range(end):
                before = best.get((start, parts - 1))
                if before is None:
                    continue
                last = sums[end] - sums[start]
                heaviest, lightest = max(before[0], last), min(before[1], last)
                if heaviest - lightest <= spread:
                    spread = heaviest - lightest
                    best[end, parts] = (heaviest, lightest, [*before[2], end])
    return best[len(weights), num_parts][2]


def partition_layers(method: str, names: Sequence[str], num_params: Sequence[int], num_stages: int) -> list[int]:
    """The first layer of each stage and the number of layers; `names` are the layers' classes."""
    chosen = method.lower()
    require(
        len(names) >= num_stages,
        f"{len(names)} layers do not fill {num_stages} stages",
        hint="lower num_stages, or cut the model into more layers",
    )
    if chosen == "uniform":
        return partition_uniform(len(names), num_stages)
    if chosen in ("parameters", "best"):
        return partition_balanced(num_params, num_stages)
    if chosen.startswith("type:"):
        pattern = re.compile(method.partition(":")[2], re.IGNORECASE)
        weights = [int(bool(pattern.search(name))) for name in names]
        if not any(weights):
            raise RuntimeError(f"Partitioning '{pattern.pattern}' found no valid layers to partition.")
        return partition_balanced(weights, num_stages)
    raise InvalidArgument(
        f"Partitioning method {method} not implemented.", hint="use uniform, parameters or type:PATTERN", method=method
    )
