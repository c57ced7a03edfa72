"""A step that a lost rank interrupted, finished from the gradients that the others have.

They compute what the lost ranks had of the batch, and average again. No sample is computed twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from torsh_distributed.parallel.data.data_strategy import DataParallel
from torsh_distributed.parallel.data.interrupted_gradients import InterruptedGradients, finish_average, keep_gradients

if TYPE_CHECKING:
    from torsh_distributed.train.engine import Engine


@dataclass(frozen=True)
class InterruptedStep:
    """What a rank has of a step that was interrupted."""

    loss: Tensor
    """Of its own samples, weighted for the mean over `num_ranks`; so are the gradients."""
    gradients: InterruptedGradients
    num_ranks: int
    total: Tensor | None = None
    """What the loss counts in the whole step, where samples do not say."""

    @property
    def averaged(self) -> frozenset[int]:
        """The buckets of gradients that have the average of all ranks already."""
        return self.gradients.outcomes.averaged


def keep_step(engine: Engine) -> InterruptedStep | None:
    """What this rank can keep of the step that has just failed, before it leaves its world; None if nothing."""
    strategy, interrupted = engine.strategy, engine.interrupted_loss
    if interrupted is None or not isinstance(strategy, DataParallel):
        return None
    loss, total = interrupted
    gradients = keep_gradients(strategy.model)
    return None if gradients is None else InterruptedStep(loss, gradients, strategy.data_degree, total)


def finish_step(engine: Engine, kept: InterruptedStep, *, members: Sequence[int], sources: Mapping[int, int]) -> float:
    """Finish the step in the new world; every rank of it calls this, and each has kept its part.

    `members` are the ranks that are left, as they were numbered when the step began; `sources` names for each bucket
    that any of them has averaged one that does.
    """
    strategy = engine.strategy
    assert isinstance(strategy, DataParallel), "only its steps are kept"
    extra = engine.lost_share(members)
    # Samples weigh equally, in a mean over another number of ranks; a batch of the user's own weighs as it did.
    scale = 1.0 if extra is None else strategy.data_degree / kept.num_ranks
    loss = kept.loss * scale
    if extra is not None and extra.num_samples:
        evenness = extra.num_samples * strategy.data_degree / extra.total
        loss = loss + engine.add_gradients(extra.batch, evenness, kept.total)
    finish_average(strategy.model, kept.gradients, sources=sources, scale=scale)
    return engine.apply_averaged(loss, None if extra is None else extra.num_samples)
