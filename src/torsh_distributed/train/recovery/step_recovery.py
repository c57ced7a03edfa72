"""A step that survives its own failures: memory that does not suffice, and a loss that diverges.

What is decided here is equal on all ranks or concerns one rank alone. Memory runs out on one rank, which repeats its
passes with smaller ones while the others wait for its gradients; that is safe only before it has sent any, so the first
pass of a step sends nothing and is the largest. Loss and norm are equal on all ranks, and so is what follows from them.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import traceback
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.checkpoint.random_generators import random_state, restore_random_state
from torsh_distributed.errors import InternalError, MemoryAllocationFailed, NonFiniteLoss, first_line
from torsh_distributed.parallel.data.ddp import DistributedDataParallel
from torsh_distributed.parallel.state.held_state import SavedState, SavedTensor
from torsh_distributed.parallel.state.held_tensors import WholeLayout
from torsh_distributed.plan.sections.recovery import RecoveryConfig
from torsh_distributed.train.batches import Batch, count_samples
from torsh_distributed.train.checkpointing import EngineCheckpoints, Resumable
from torsh_distributed.train.recovery.open_incidents import OpenIncidents
from torsh_distributed.train.update import GradientNorm


class StateSnapshot(SavedState):
    """The state of an Engine after a step; every rank makes one and restores one at the same point."""

    def __init__(self, engine: Resumable) -> None:
        engine.settle()
        state = engine.strategy.held_state(engine.optimizer)
        self._copies = {held.name: held.read().detach().clone() for held in state.tensors}
        self.tensors = {held.name: SavedTensor(held.layout.shape, held.dtype) for held in state.tensors}
        self.values = copy.deepcopy(state.values)
        self.num_steps = engine.num_steps
        self._rest: dict[str, Any] = copy.deepcopy(
            {
                "precision": engine.precision.state_dict(),
                "learning_rate": engine.learning_rate.state_dict(),
                "strategy": engine.strategy.state_dict(),
                "ledger": engine.ledger.state_dict(),
                "num_skipped": engine.num_skipped,
            }
        )
        self._random = random_state()

    @property
    def num_bytes(self) -> int:
        """Memory that the copies take on this rank."""
        return sum(one.numel() * one.element_size() for one in self._copies.values())

    @override
    def fill(self, name: str, layout: WholeLayout, local: Tensor) -> None:
        kept = self._copies[name]
        if kept.shape != local.shape:
            raise InternalError(
                f"{name} has another shape than its copy", copy=tuple(kept.shape), tensor=tuple(local.shape)
            )
        with torch.no_grad():
            local.copy_(kept)

    def restore(self, engine: Resumable, *, with_data: bool) -> None:
        """Go back to this state; `with_data` also where its data stood, so that their batches are repeated."""
        engine.strategy.load_held_state(engine.optimizer, self)
        rest = copy.deepcopy(self._rest)
        engine.precision.load_state_dict(rest["precision"])
        engine.learning_rate.load_state_dict(rest["learning_rate"], data_degree=engine.strategy.data_degree)
        engine.strategy.load_state_dict(rest["strategy"])
        engine.num_steps, engine.num_skipped = self.num_steps, rest["num_skipped"]
        restore_random_state(self._random)
        if with_data:
            engine.ledger.load_state_dict(rest["ledger"])


_log = logging.getLogger(__name__)
_MEMORY, _DIVERGENCE = "out_of_memory", "divergence"
_NUM_SNAPSHOTS = 2


class Recoverable(Resumable, Protocol):
    """What of an Engine a step consists of."""

    gradient_norm: GradientNorm

    @property
    def checkpoints(self) -> EngineCheckpoints:
        """Where earlier states are kept."""

    def microbatches(self, batch: Batch, *, num_pieces: int | None = None) -> Iterator[Batch]:
        """Start an update."""

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a part of it."""

    def backward(self, loss: Tensor) -> None:
        """Its gradients."""

    def apply(self) -> float:
        """Update the parameters; returns the loss."""


class StepRecovery:
    """Runs the steps of an Engine, and acts on what goes wrong in them."""

    def __init__(self, engine: Recoverable, config: RecoveryConfig) -> None:
        self._engine = engine
        self._config = config
        self._incidents = OpenIncidents()
        self._num_pieces = engine.plan.training.gradient_accumulation
        if config.out_of_memory == "smaller_microbatch":
            self._num_pieces = max(2, self._num_pieces)
        self._snapshots: deque[StateSnapshot] = deque(maxlen=_NUM_SNAPSHOTS)
        self._num_roll_backs = 0

    def step(self, batch: Batch) -> float:
        """One update; a step that diverged is undone, and its loss returned."""
        if self._config.divergence == "roll_back":
            self._snapshot_if_due()
        try:
            loss = self._update(batch)
            problem = self._divergence(loss)
        except NonFiniteLoss as error:
            if self._config.divergence == "raise":
                raise
            loss, problem = math.nan, error.message
            self._roll_back(problem, error)
            return loss
        if problem is not None:
            self._roll_back(problem, NonFiniteLoss(problem, step=self._engine.num_steps))
        else:
            self._incidents.step_done(self._engine.num_steps)
        return loss

    # --- memory -----------------------------------------------------------------------------------------------

    def _update(self, batch: Batch) -> float:
        engine = self._engine
        if self._config.out_of_memory == "raise":
            for piece in engine.microbatches(batch):
                engine.backward(engine.forward(piece))
            return engine.apply()
        num_samples, model = count_samples(batch), engine.strategy.model
        num_syncs = model.num_buffer_syncs if isinstance(model, DistributedDataParallel) else 0
        while True:
            num_done, count = 0, min(self._num_pieces, num_samples)
            try:
                for piece in engine.microbatches(batch, num_pieces=count):
                    engine.backward(engine.forward(piece))
                    num_done += 1
                break
            except (torch.OutOfMemoryError, MemoryError) as error:
                self._use_smaller(error, count, num_samples, is_last=num_done == count - 1)
                if isinstance(model, DistributedDataParallel) and model.num_buffer_syncs > num_syncs:
                    # The failed pass has broadcast the buffers; the other ranks do so once in a step.
                    model.require_forward_param_sync = False
        return engine.apply()

    def _use_smaller(self, error: BaseException, count: int, num_samples: int, *, is_last: bool) -> None:
        """Halve the microbatch, or raise where it cannot be: nothing is left to halve, or gradients were sent."""
        step = self._engine.num_steps
        if is_last or count >= num_samples:
            detail = "memory does not suffice for one sample"
            if count < num_samples:
                detail = "memory ran out in the last pass of a step, when gradients may have been sent"
            self._incidents.failed(_MEMORY, step=step, detail=detail)
            raise MemoryAllocationFailed(detail, microbatch=math.ceil(num_samples / count)) from error
        smaller = min(2 * count, num_samples)
        detail = f"{first_line(error)}; microbatch {math.ceil(num_samples / count)} of {num_samples} samples"
        action = "halve the microbatch, keep the batch"
        self._incidents.open(_MEMORY, action, step=step, detail=detail)
        self._num_pieces = smaller
        # The frames of the failed pass hold its activations.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
            torch.cuda.empty_cache()
        self._incidents.acted(_MEMORY)

    @property
    def num_pieces(self) -> int:
        """Passes of a step on this rank, as learned so far."""
        return self._num_pieces

    # --- divergence -------------------------------------------------------------------------------------------

    def _divergence(self, loss: float) -> str | None:
        """Why the step that was just done counts as diverged; equal on all ranks."""
        config = self._config
        if config.divergence == "raise":
            return None
        if config.max_loss is not None and not loss <= config.max_loss:
            return f"the loss of step {self._engine.num_steps} is {loss:g}, above recovery.max_loss {config.max_loss:g}"
        norm = self._engine.gradient_norm.last
        if config.max_gradient_norm is not None and norm is not None and not norm.wait() <= config.max_gradient_norm:
            return (
                f"the norm of the gradient of step {self._engine.num_steps} is {norm.wait():g}, above"
                f" recovery.max_gradient_norm {config.max_gradient_norm:g}"
            )
        return None

    def _snapshot_if_due(self) -> None:
        engine, config = self._engine, self._config
        if config.roll_back_from == "checkpoint":
            return
        newest = self._snapshots[-1].num_steps if self._snapshots else None
        if newest is None or engine.num_steps - newest >= config.roll_back_steps:
            self._snapshots.append(StateSnapshot(engine))

    def _roll_back(self, problem: str, error: NonFiniteLoss) -> None:
        """Go back at least `roll_back_steps` if a copy is that old; raise once the limit is reached."""
        engine, config = self._engine, self._config
        step = engine.num_steps
        self._num_roll_backs += 1
        if self._num_roll_backs > config.max_roll_backs:
            self._incidents.failed(_DIVERGENCE, step=step, detail=problem)
            error.add_note(f"rolled back {config.max_roll_backs} times (recovery.max_roll_backs); it did not help")
            raise error
        self._incidents.open(_DIVERGENCE, "roll back", step=step, detail=problem)
        with_data = not config.skip_batches
        if not with_data:
            engine.ledger.pass_over()
        if config.roll_back_from == "checkpoint":
            self._load_checkpoint(error, with_data=with_data)
        else:
            old = [one for one in self._snapshots if step - one.num_steps >= config.roll_back_steps]
            chosen = old[-1] if old else self._snapshots[0]
            while self._snapshots[-1] is not chosen:
                self._snapshots.pop()
            chosen.restore(engine, with_data=with_data)
        _log.warning(
            "rolled back from step %d to %d; the batches between are %s",
            step,
            engine.num_steps,
            "trained on again" if with_data else "passed over",
        )
        self._incidents.acted(_DIVERGENCE)

    def _load_checkpoint(self, error: NonFiniteLoss, *, with_data: bool) -> None:
        """The newest checkpoint; the loader goes on where it is unless `with_data`."""
        engine = self._engine
        engine.checkpoints.wait()
        data = engine.ledger.state_dict()
        if engine.checkpoints.resume() is None:
            self._incidents.failed(_DIVERGENCE, step=engine.num_steps, detail="no checkpoint was saved yet")
            error.add_note("recovery.roll_back_from = checkpoint, but no checkpoint was saved yet")
            raise error
        if not with_data:
            engine.ledger.load_state_dict(data)
