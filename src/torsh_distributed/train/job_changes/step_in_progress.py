"""The step of an Engine that is in progress when the world changes: kept, finished by those left, or done again.

The survivors of a lost rank that all have their gradients compute what the lost one had of the batch, and average
again: no sample is computed twice. `elastic` decides which way a step goes, and calls this on every rank of a world
in the same order: `keep` before it leaves the old world, `regrouped` in the new one, then `finish`, `divide_again` or
`divide_next`. All of it runs on the thread that trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torsh_distributed.parallel.data.data_strategy import DataParallel
from torsh_distributed.parallel.data.interrupted_gradients import InterruptedGradients, finish_average, keep_gradients
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.train.batches import Batch, RankBatch, count_samples, split_rows, to_device
from torsh_distributed.train.engine import Engine
from torsh_distributed.train.speed.attention_kernel import attending_with
from torsh_distributed.train.update import Update


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


class StepInProgress:
    """What becomes of an Engine's step, its batch and its saves when ranks come and go."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def keep(self) -> InterruptedStep | None:
        """What this rank can keep of the step that has just failed, before it leaves its world; None if nothing."""
        update, strategy = self._engine.update, self._engine.strategy
        if update is None or update.mean is None or not isinstance(strategy, DataParallel):
            return None  # before its last backward a rank lacks gradients of later microbatches
        if update.weights is None or update.weights.correction is not None:
            return None  # it was being finished when another rank was lost, or its weights are known at its end alone
        gradients = keep_gradients(strategy.model)
        if gradients is None:
            return None
        return InterruptedStep(update.loss, gradients, strategy.data_degree, update.weights.total)

    def finish(self, kept: InterruptedStep, *, members: Sequence[int], sources: Mapping[int, int]) -> float:
        """Finish the step in the new world; every rank of it calls this, and each has kept its part.

        `members` are the ranks that are left, as they were numbered when the step began; `sources` names for each
        bucket that any of them has averaged one that does.
        """
        engine, strategy = self._engine, self._engine.strategy
        assert isinstance(strategy, DataParallel), "only its steps are kept"
        extra = self._lost_share(members)
        # Samples weigh equally, in a mean over another number of ranks; a batch of the user's own weighs as it did.
        scale = 1.0 if extra is None else strategy.data_degree / kept.num_ranks
        loss = kept.loss * scale
        if extra is not None and extra.num_samples:
            evenness = extra.num_samples * strategy.data_degree / extra.total
            loss = loss + self._add_gradients(extra.batch, evenness, kept.total)
        finish_average(strategy.model, kept.gradients, sources=sources, scale=scale)
        num_samples = None if extra is None else extra.num_samples
        engine.update = Update(losses=[loss], num_samples=num_samples, mean=engine.mean_loss(loss))
        return engine.apply()

    def divide_again(self, batch: Batch) -> Batch:
        """After `regrouped`, if the step is done again: this rank's share of its batch, and of those to come.

        A batch that is not from `Engine.batches` stays as it is.
        """
        feed = self._engine.feed
        return batch if feed.divided is None else feed.take(feed.divided.divide(*feed.place), self._engine.num_steps)

    def divide_next(self) -> None:
        """After `regrouped`, if the step is done: divide the batches after the current one among the new ranks."""
        feed = self._engine.feed
        if feed.divided is not None:
            feed.divided.divide_next(*feed.place)

    def regrouped(self, strategy: Strategy) -> None:
        """Go on in another world, between two steps or with the one that was interrupted given up; every rank of it.

        `strategy` is over the new world. The learning rate follows the number of replicas as the plan says.
        """
        engine = self._engine
        engine.strategy = strategy
        engine.discard_update()
        engine.loss.forget_total()
        engine.learning_rate.rescale(strategy.data_degree)
        if engine.changes is not None:
            engine.changes.world_changed(engine)

    def abandon_saves(self) -> None:
        """The world is about to change: what is being written, with ranks that may be gone, is given up."""
        checkpoints, self._engine.opened_checkpoints = self._engine.opened_checkpoints, None
        if checkpoints is not None:
            replicas = checkpoints.abandon("the world changes")
            if replicas is not None:
                replicas.close()

    def _lost_share(self, members: Sequence[int]) -> RankBatch | None:
        """This rank's part of what others had of the current batch, with `members` of its ranks left.

        None if the batch is not from `Engine.batches`: nobody knows then what the others had.
        """
        engine, divided = self._engine, self._engine.feed.divided
        if divided is None:
            return None
        share, total = engine.ledger.assign(engine.num_steps, members), engine.ledger.total
        batch = to_device(divided.rows(share), engine.device) if share else None
        return RankBatch(batch, len(share), total)

    def _add_gradients(self, batch: Batch, evenness: float, total: Tensor | None) -> Tensor:
        """Add the gradients of what a lost rank had to those held, without averaging; returns its weighted loss.

        `evenness`: its samples over an equal share of the step's; `total`: what the loss counts in the whole step.
        """
        engine = self._engine
        strategy, loss_of, training = engine.strategy, engine.loss, engine.plan.training
        losses = []
        for piece, share in split_rows(batch, count_samples(batch), training.gradient_accumulation):
            with attending_with(training.attention):
                with engine.precision.computing():
                    guarded = loss_of.guarded(piece, is_counted=total is not None)
                    loss = loss_of.compute(strategy, engine.unwrapped, guarded)
                    loss = loss * loss_of.weight_of_rest(strategy, piece, evenness * share, total)
                engine.precision.scaled(loss).backward()  # type: ignore[no-untyped-call]  # untyped in torch
            losses.append(loss.detach())
        return torch.stack(losses).sum()
