"""What training does about its own failures: the `recovery` section of a plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torsh_distributed.plan.section import Section


class RecoveryConfig(Section):
    """Act on memory that runs out, a loss that diverges, a disk that is full. Each is resolved by a completed step."""

    out_of_memory: Literal["raise", "smaller_microbatch"] = "raise"
    """When a pass does not fit: raise, or repeat it in halves and keep the batch. A step then has two passes or more,
    the first of which shows that the memory suffices before gradients are sent."""

    divergence: Literal["raise", "roll_back"] = "raise"
    """When the loss or the gradient is not finite, or above a limit below: raise, or go back to an earlier state."""

    max_loss: float | None = Field(default=None, gt=0)
    """A loss above this counts as diverged. Left out: only one that is not finite."""

    max_gradient_norm: float | None = Field(default=None, gt=0)
    """A norm of the gradient, before clipping, above this counts as diverged. Left out: only one that is not finite."""

    roll_back_steps: int = Field(default=20, ge=1)
    """Steps between copies of the state, and how far a roll back goes at least, if a copy is that old."""

    roll_back_from: Literal["memory", "checkpoint"] = "memory"
    """Where earlier states are: two copies in the memory of each rank, or the newest checkpoint."""

    max_roll_backs: int = Field(default=3, ge=0)
    """Roll backs in a run; the next divergence is raised."""

    skip_batches: bool = True
    """Pass over the batches that were rolled back; off trains on them again, which ends the same unless the cause was
    temporary."""

    storage: Literal["raise", "go_on"] = "raise"
    """When a periodic checkpoint cannot be written: raise, or go on without, say so, and try again as [retry] says."""

    @property
    def acts_on_steps(self) -> bool:
        """Whether steps are more than forward, backward and update."""
        return self.out_of_memory != "raise" or self.divergence != "raise"
