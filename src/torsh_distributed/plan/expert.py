"""How tokens find experts: the `expert` section of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.base import Section
from torsh_distributed.plan.problems import Problem


class ExpertParallelismConfig(Section):
    """Routing in mixture-of-experts layers; the ranks that experts are spread over are mesh.ep."""

    num_experts: int = Field(default=8, ge=1)
    """Experts of a layer, over all ranks."""

    num_experts_per_token: int = Field(default=2, ge=1)
    """Experts that each token is sent to."""

    capacity_factor: float = Field(default=1.25, gt=0)
    """Room of an expert, as a multiple of an even share of the tokens. Larger loses fewer, smaller computes less."""

    overflow: Literal["drop", "reroute"] = "drop"
    """What happens to a token whose expert is full: it skips the layer, or goes to the least loaded expert."""

    load_balance_loss_coeff: float = Field(default=0.01, ge=0)
    """Weight of the loss that evens out the experts' load."""

    router_z_loss_coeff: float = Field(default=0.001, ge=0)
    """Weight of the loss that keeps router logits small."""

    rebalance_threshold: float | None = Field(default=None, gt=0)
    """Move experts between ranks once the coefficient of variation of their load exceeds this; 0.3 is a fair start."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.num_experts_per_token > self.num_experts:
            yield Problem(
                "num_experts_per_token",
                f"num_experts_per_token {self.num_experts_per_token} is above num_experts {self.num_experts}",
                "a token cannot go to more experts than there are",
            )
