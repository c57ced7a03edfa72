"""Robust rules by their names, for the command line."""

from __future__ import annotations

import difflib

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.federated.robust.base import RobustRule
from torsh_distributed.federated.robust.by_coordinate import Median, TrimmedMean
from torsh_distributed.federated.robust.by_distance import Bulyan, GeometricMedian, Krum, MultiKrum, NormClipping

_KINDS: tuple[type[RobustRule], ...] = (Median, TrimmedMean, Krum, MultiKrum, Bulyan, GeometricMedian, NormClipping)
RULES: dict[str, type[RobustRule]] = {kind.name: kind for kind in _KINDS}


def rule_named(name: str, hostile: int) -> RobustRule:
    """The rule against so many hostile clients."""
    if name not in RULES:
        near = difflib.get_close_matches(name, RULES, 1)
        raise InvalidArgument(
            "there is no robust rule of this name",
            hint=f"did you mean {near[0]}?" if near else f"one of {', '.join(RULES)}",
            rule=name,
        )
    return RULES[name](hostile=hostile)
