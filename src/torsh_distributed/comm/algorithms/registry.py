"""The algorithms by the names users type."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torsh_distributed.comm.algorithms.base import Algorithm
from torsh_distributed.comm.algorithms.hierarchical import Hierarchical
from torsh_distributed.comm.algorithms.pipelined import Pipelined
from torsh_distributed.comm.algorithms.reduce_scatter_all_gather import ReduceScatterAllGather
from torsh_distributed.comm.algorithms.ring import DoubleBuffered, Ring
from torsh_distributed.comm.algorithms.tree import Doubling, Tree
from torsh_distributed.errors import InvalidArgument

AUTO = "auto"
DETERMINISTIC = ReduceScatterAllGather()
"""The default of deterministic sums."""

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        algorithm.name: algorithm
        for algorithm in (
            Ring(),
            Tree(),
            Doubling(),
            Hierarchical(),
            ReduceScatterAllGather(),
            Pipelined(),
            DoubleBuffered(),
        )
    }
)


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name, or InvalidArgument with the known names."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    raise InvalidArgument(
        "unknown all-reduce algorithm",
        hint=(
            f"it packs several tensors: call {name}_all_reduce(tensors)"
            if name in ("fused", "bucketed")
            else f"use one of: {', '.join((AUTO, *ALGORITHMS))}"
        ),
        algorithm=name,
    )


def check_order(algorithm: Algorithm) -> None:
    """Refuse an algorithm that cannot add in a fixed order."""
    if not algorithm.keeps_rank_order:
        able = ", ".join(name for name, known in ALGORITHMS.items() if known.keeps_rank_order)
        raise InvalidArgument(
            f"{algorithm.name} adds in an order that depends on the number and the layout of ranks",
            hint=f"with deterministic=True leave algorithm out, or use one of: {AUTO}, {able}",
            algorithm=algorithm.name,
        )
