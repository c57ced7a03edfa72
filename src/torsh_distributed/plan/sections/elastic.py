"""How a run goes on when ranks come and go: the `elastic` section of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.problems import Problem
from torsh_distributed.plan.section import Section


class ElasticConfig(Section):
    """Survive lost ranks and take in new ones."""

    enabled: bool = False
    """Go on with the survivors when a rank is lost, and let new ones join."""

    mode: Literal["in_place", "restart"] = "in_place"
    """Survivors keep their process and rebuild the groups, or all processes start anew."""

    min_workers: int = Field(default=1, ge=1)
    """With fewer ranks training pauses."""

    max_workers: int = Field(default=64, ge=1)
    """More ranks are not taken in."""

    heartbeat_timeout_s: float = Field(default=60.0, gt=0)
    """Silence after which a rank counts as lost."""

    scaling_timeout_s: float = Field(default=300.0, gt=0)
    """Deadline of a change of membership, from detection to the first step after it."""

    scaling_check_interval_s: float = Field(default=30.0, gt=0)
    """Time between two looks for ranks that want to join."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.min_workers > self.max_workers:
            yield Problem(
                "min_workers",
                f"min_workers {self.min_workers} is above max_workers {self.max_workers}",
                "lower the first or raise the second",
            )
