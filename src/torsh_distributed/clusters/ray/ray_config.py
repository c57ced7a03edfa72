"""What a user of Ray may set for the workers of a job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torsh_distributed.errors import InvalidArgument

PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig:
    """Which cluster, what each worker gets of it, and where workers are placed."""

    address: str | None = None
    """The cluster: `auto`, `HOST:PORT`, or None for the one this process is connected to, RAY_ADDRESS, or a new local
    one that ends with the job."""

    cpus_per_worker: float = 1
    """Cores that each worker reserves."""

    gpus_per_worker: int = 0
    """GPUs that each worker has to itself."""

    memory_per_worker_bytes: int | None = None
    """Memory that each worker reserves; Ray counts it and does not enforce it."""

    resources_per_worker: Mapping[str, float] = field(default_factory=dict)
    """Custom resources that each worker reserves."""

    placement: PlacementStrategy = "PACK"
    """PACK: as few nodes as possible. SPREAD: as many. STRICT_PACK: one node. STRICT_SPREAD: a node for each worker."""

    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of the workers, such as `{"working_dir": "."}`: it carries the code to other nodes."""

    start_timeout_s: float = 120.0
    """How long the cluster may take to give the workers."""

    waits_for_nodes: bool = False
    """Whether to wait for nodes that an autoscaler will add, instead of refusing what the cluster is too small for."""

    def __post_init__(self) -> None:
        if self.placement not in get_args(PlacementStrategy):
            raise InvalidArgument(
                f"placement must be one of {', '.join(get_args(PlacementStrategy))}", placement=self.placement
            )
        for name in ("cpus_per_worker", "gpus_per_worker"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InvalidArgument(f"{name} must not be negative", got=value)
        if not 0 < self.start_timeout_s < math.inf:
            raise InvalidArgument("start_timeout_s must be a positive number of seconds", got=self.start_timeout_s)

    @property
    def bundle(self) -> dict[str, float]:
        """What one worker reserves, as Ray's placement groups take it."""
        bundle: dict[str, float] = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker}
        if self.memory_per_worker_bytes is not None:
            bundle["memory"] = self.memory_per_worker_bytes
        return {name: amount for name, amount in {**bundle, **self.resources_per_worker}.items() if amount}


def most_that_fit(
    nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float], placement: PlacementStrategy
) -> int:
    """How many workers of this bundle the nodes could hold if nothing else ran there."""
    on_each = [
        min((math.floor(node.get(name, 0) / amount + 1e-9) for name, amount in bundle.items()), default=2**31)
        for node in nodes
    ]
    match placement:
        case "STRICT_PACK":
            return max(on_each, default=0)
        case "STRICT_SPREAD":
            return sum(count > 0 for count in on_each)
        case _:
            return sum(on_each)
