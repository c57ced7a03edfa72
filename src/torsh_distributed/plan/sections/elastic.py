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
    """Go on when a rank is lost, and let new ones join. `torsh run --elastic` turns it on."""

    mode: Literal["in_place", "restart"] = "in_place"
    """Survivors keep their process and regroup, where the plan is plain data parallelism; or all processes restart."""

    on_loss: Literal["replace", "shrink", "wait", "restart"] = "replace"
    """After a loss: go on and replace the rank, go on smaller, wait for the replacement, or restart all."""

    min_workers: int = Field(default=1, ge=1)
    """Fewest ranks to train with; below that training waits for replacements."""

    max_workers: int = Field(default=64, ge=1)
    """Most ranks to train with; more are not admitted."""

    heartbeat_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds of silence after which a rank that runs counts as lost; one that is stopped does after 0.4 s."""

    scaling_timeout_s: float = Field(default=300.0, gt=0)
    """Timeout of a membership change, from detection to the new groups, and of the wait for replacements."""

    scaling: Literal["reactive", "conservative", "aggressive"] = "reactive"
    """When the number of ranks changes: on failures and requests alone; or also by load, the share of time spent in
    steps: slowly (above 0.9, below 0.2) or at once (above 0.8, below 0.3)."""

    scaling_interval_s: float = Field(default=30.0, gt=0)
    """Seconds between two looks at the load."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.min_workers > self.max_workers:
            yield Problem(
                "min_workers",
                f"elastic.min_workers {self.min_workers} is above elastic.max_workers {self.max_workers}",
                "lower the first or raise the second",
            )
        if self.scaling != "reactive" and self.mode == "restart":
            yield Problem(
                "scaling",
                f"elastic.scaling = {self.scaling} changes the ranks while training goes on; elastic.mode is restart",
                'set elastic.mode = "in_place", or leave scaling out',
            )
