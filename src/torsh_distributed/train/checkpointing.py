"""Checkpoints of an Engine: what of it is kept, and the plan's section `checkpoint` at work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from torsh_distributed.checkpoint import run_facts
from torsh_distributed.checkpoint.checkpoint_manager import CheckpointManager
from torsh_distributed.checkpoint.files.manifest import CheckpointMetadata
from torsh_distributed.checkpoint.restoring import world_group
from torsh_distributed.checkpoint.saving.checkpoint_writer import SAVING
from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import CheckpointError, IoError, TorshError
from torsh_distributed.parallel.state.held_state import MODEL
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.plan import Plan
from torsh_distributed.train.learning_rate import LearningRate
from torsh_distributed.train.ledger.sample_ledger import SampleLedger
from torsh_distributed.train.precision import Precision
from torsh_distributed.train.recovery.deferred_saves import DeferredSaves


class Resumable(Protocol):
    """What of an Engine is kept."""

    strategy: Strategy
    optimizer: Optimizer
    plan: Plan
    precision: Precision
    learning_rate: LearningRate
    num_steps: int
    num_skipped: int
    ledger: SampleLedger

    def settle(self) -> None:
        """Wait for the last update."""


class EngineCheckpoints:
    """Saves and loads an Engine; every rank makes the same calls."""

    def __init__(self, engine: Resumable) -> None:
        self._engine = engine
        self._managers: dict[Path, CheckpointManager] = {}
        self._deferred: DeferredSaves | None = None
        if engine.plan.checkpoint.enabled:
            self._manager(None).watch()
            if engine.plan.recovery.storage == "go_on":
                self._deferred = DeferredSaves(engine.plan.retry, self._manager(None).ask)

    def after_step(self, loss: float) -> None:
        """Save if the plan's section says so."""
        if not self._engine.plan.checkpoint.enabled:
            return
        manager = self._manager(None)
        if self._deferred is not None:
            self._deferred.after_step(self._engine.num_steps)
        decision = manager.decide(self._engine.num_steps)
        if decision is None:
            return
        if self._deferred is None or decision.is_last:
            self._save(manager, decision.reason, loss)
        else:
            self._save_or_defer(manager, self._deferred, decision.reason, loss)
        manager.end_if_told(decision)

    def _save_or_defer(self, manager: CheckpointManager, deferred: DeferredSaves, reason: str, loss: float) -> None:
        """Save; a failure, which all ranks learn, is noted. One of the save before was noted when it ended."""
        before = manager.take_failure()
        if before is not None:
            deferred.failed(self._engine.num_steps, before.message)
        try:
            self._save(manager, reason, loss)
        except TorshError as error:
            # Ranks whose own disk is fine raise ProcessFailure, in the name of the one that could not save.
            if not isinstance(error, CheckpointError | IoError) and error.operation != SAVING:
                raise
            deferred.failed(self._engine.num_steps, error.message)

    def save(self, path: str | os.PathLike[str] | None = None, *, wait: bool = True, loss: float | None = None) -> None:
        """Save now, under `path` or the plan's directory."""
        manager = self._manager(path)
        self._save(manager, "asked", loss)
        if wait:
            manager.wait_for_commit()

    def ask(self) -> None:
        """Save to the plan's directory at the ranks' next exchange, about a second from now; any rank may ask."""
        self._manager(None).ask()

    def save_if_best(self, metric: float) -> bool:
        """Save to the plan's directory if `metric`, equal on all ranks, is lower than all before; returns whether."""
        manager = self._manager(None)
        if not manager.is_best(metric):
            return False
        self._save(manager, "best", metric)
        return True

    def wait(self) -> None:
        """Wait until nothing is being written; raises on every rank if a save failed."""
        for manager in self._managers.values():
            manager.wait()

    def close(self) -> None:
        """Finish what is being written; happens by itself when the process group is destroyed."""
        if self._deferred is not None:
            self._deferred.close()
        for manager in self._managers.values():
            manager.close()
        self._managers = {}

    def resume(self) -> CheckpointMetadata | None:
        """Load the newest checkpoint of the plan's directory, if it has any."""
        return self.load() if self._manager(None).has_any() else None

    def load(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        strict: bool = True,
        model_only: bool = False,
    ) -> CheckpointMetadata:
        """Load the newest whole checkpoint under `path` or the plan's directory, or the one of `step`."""
        engine, manager = self._engine, self._manager(path)
        saved = manager.open(step)
        if not model_only and "engine" not in saved.values:
            raise CheckpointError(
                f"{saved.directory.name} holds no Engine's state: a CheckpointManager of one's own loop saved it",
                hint="load the model alone with model_only=True, or load it with CheckpointManager",
            )
        manager.fit(saved, engine.strategy.held_state(engine.optimizer), [MODEL], strict=strict)
        with fail_together("load the checkpoint", world_group()):
            engine.strategy.load_held_state(engine.optimizer, saved, with_optimizer=not model_only)
        if not model_only:
            values = saved.values["engine"]
            engine.precision.load_state_dict(values["precision"])
            engine.learning_rate.load_state_dict(values["learning_rate"], data_degree=engine.strategy.data_degree)
            engine.num_steps, engine.num_skipped = values["num_steps"], values["num_skipped"]
            engine.ledger.load_state_dict(values)
        own = manager.loaded(saved, with_generators=not model_only, seed=engine.plan.training.seed)
        if own is not None and not model_only and _place(engine.plan) == own["place"]:
            engine.strategy.load_state_dict(own["strategy"])
        return saved.manifest.metadata

    def _save(self, manager: CheckpointManager, reason: str, loss: float | None) -> None:
        engine = self._engine
        engine.settle()
        state = engine.strategy.held_state(engine.optimizer)
        state.values["engine"] = {
            "precision": engine.precision.state_dict(),
            "learning_rate": engine.learning_rate.state_dict(),
            "num_steps": engine.num_steps,
            "num_skipped": engine.num_skipped,
            **engine.ledger.state_dict(),
        }
        rates = [float(group["lr"]) for group in engine.optimizer.param_groups]
        manager.save_held(
            engine.num_steps,
            state,
            reason,
            own={"place": _place(engine.plan), "strategy": engine.strategy.state_dict()},
            loss=loss,
            epoch=engine.ledger.epoch,
            learning_rate=rates[0] if rates else None,
        )

    def _manager(self, path: str | os.PathLike[str] | None) -> CheckpointManager:
        """The manager of a directory: one for each, so two saves to it never overlap."""
        plan = self._engine.plan
        config = plan.checkpoint if path is None else plan.checkpoint.replace(dir=os.fspath(path), remote=None)
        place = Path(config.dir).absolute()
        if place not in self._managers:
            values = plan.model_dump(mode="json")
            facts: dict[str, Any] = {
                "mesh": {axis: degree for axis, degree in plan.mesh.model_dump().items() if isinstance(degree, int)},
                "plan": values,
                "plan_hash": run_facts.hash_of_plan(values),
            }
            self._managers[place] = CheckpointManager(
                config, facts=facts, device=_device(self._engine), retry=plan.retry
            )
        return self._managers[place]


def _place(plan: Plan) -> list[Any]:
    """Where a rank's own state belongs: to this rank of this mesh."""
    return [process_group.rank(), process_group.world_size(), plan.mesh.model_dump(mode="json")]


def _device(engine: Resumable) -> torch.device:
    return next(engine.strategy.unwrapped.parameters()).device
