"""How a run continues when ranks come and go: the `elastic` section of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.problems import Problem
from torsh_distributed.plan.section import Section


class ElasticConfig(Section):
    """Survive lost ranks and admit new ones."""

    enabled: bool = False
    """Continue with the survivors when a rank is lost, and let new ones join."""

    mode: Literal["in_place", "restart"] = "in_place"
    """Survivors keep their process and rebuild the groups, or all processes restart."""

    min_workers: int = Field(default=1, ge=1)
    """Fewest ranks to train with; below that training pauses."""

    max_workers: int = Field(default=64, ge=1)
    """Most ranks to train with; more are not admitted."""

    heartbeat_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a heartbeat after which a rank counts as lost."""

    scaling_timeout_s: float = Field(default=300.0, gt=0)
    """Timeout of a membership change, from detection to the first step after it."""

    scaling_check_interval_s: float = Field(default=30.0, gt=0)
    """Seconds between checks for ranks that want to join."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.min_workers > self.max_workers:
            yield Problem(
                "min_workers",
                f"elastic.min_workers {self.min_workers} is above elastic.max_workers {self.max_workers}",
                "lower the first or raise the second",
            )
