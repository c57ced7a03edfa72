"""Checkpoints of an Engine: what of it is kept, and the plan's section `checkpoint` at work."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from torsh_distributed import events, known_variables
from torsh_distributed.checkpoint import run_facts
from torsh_distributed.checkpoint.checkpoint_manager import CheckpointManager
from torsh_distributed.checkpoint.files.manifest import CheckpointMetadata
from torsh_distributed.checkpoint.loading.restoring import understood, world_group
from torsh_distributed.checkpoint.loading.saved_snapshot import SavedSnapshot
from torsh_distributed.checkpoint.random_generators import random_state
from torsh_distributed.checkpoint.replicas.neighbour_replicas import NeighbourReplicas
from torsh_distributed.checkpoint.replicas.recovery import RecoveredState, recover_kept
from torsh_distributed.checkpoint.saving.checkpoint_writer import SAVING
from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import CheckpointError, IoError, TorshError
from torsh_distributed.parallel.state.held_state import MODEL, OPTIMIZER, HeldState
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.plan import Plan
from torsh_distributed.train.learning_rate import LearningRate
from torsh_distributed.train.ledger.sample_ledger import SampleLedger
from torsh_distributed.train.precision import Precision
from torsh_distributed.train.recovery.open_incidents import DeferredSaves

_log = logging.getLogger(__name__)


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
        section = engine.plan.checkpoint
        self.replicas: NeighbourReplicas | None = None
        """The ranks' state in each other's memory, if the plan has `checkpoint.replica_every_steps`."""
        self._deferred: DeferredSaves | None = None
        if section.enabled:
            self._manager(None).watch()
            if engine.plan.recovery.storage == "go_on":
                self._deferred = DeferredSaves(engine.plan.retry, self._manager(None).ask)
        if section.enabled and section.replica_every_steps is not None:
            self.replicas = self._neighbours()

    def hold(self) -> None:
        """Training begins: if the plan saves, no other job may write to its directory from here on."""
        if self._engine.plan.checkpoint.enabled:
            self._manager(None).hold()

    def after_step(self, loss: float) -> None:
        """Save if the plan's section says so."""
        section = self._engine.plan.checkpoint
        if not section.enabled:
            return
        manager, step = self._manager(None), self._engine.num_steps
        if self.replicas is not None and section.replica_every_steps and step % section.replica_every_steps == 0:
            self._replicate(self.replicas, loss)
        if self._deferred is not None:
            self._deferred.after_step(step)
        decision = manager.decide(step, raises_failures=self._deferred is None)
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

    def save(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        wait: bool = True,
        loss: float | None = None,
        leave_out: Collection[str] = (),
    ) -> None:
        """Save now, under `path` or the plan's directory; `leave_out` names tensors of the model that are not saved."""
        manager = self._manager(path)
        self._save(manager, "asked", loss, leave_out=leave_out)
        if wait:
            manager.wait_for_commit()

    def ask(self) -> None:
        """Save to the plan's directory at the ranks' next exchange, about a second from now; any rank may ask."""
        self._manager(None).ask()

    def use_intervals(self, *, every_steps: int, every_s: float | None) -> None:
        """Save to the plan's directory at other intervals from now on; every rank calls this between steps."""
        self._manager(None).use_intervals(every_steps=every_steps, every_s=every_s)

    def save_if_best(self, metric: float) -> bool:
        """Save to the plan's directory if rank 0's `metric` is lower than all before; returns whether, on all ranks."""
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
        if self.replicas is not None:
            self.replicas.close()
            self.replicas = None

    def abandon(self, reason: str) -> NeighbourReplicas | None:
        """After a rank was lost: give up what is being written, without waiting for that rank; older ones stay whole.

        Returns the copies in memory, which stay, for `recover`; the caller closes them once all ranks have loaded.
        """
        if self._deferred is not None:
            self._deferred.close()
        for manager in self._managers.values():
            manager.abandon(reason)
        self._managers = {}
        replicas, self.replicas = self.replicas, None
        return replicas

    def resume(self) -> CheckpointMetadata | None:
        """Load the newest state, of the plan's directory or what workers before these left in memory; None without any.

        The latter needs `checkpoint.replica_every_steps` and a launcher that has started the workers again. If the plan
        saves, the directory is this job's from here on.
        """
        self.hold()
        on_disk = self._manager(None).newest_step()
        in_memory = self._left_in_memory()
        if in_memory is not None:
            if on_disk is None or in_memory.metadata.step >= on_disk:
                metadata = self.restore(in_memory)
                if on_disk is not None:
                    path = str(self._manager(None).directory.step_path(on_disk))
                    events.emit(events.CheckpointEvent(action="found", path=path, step=on_disk))
                if process_group.rank() == 0:
                    _log.info("resumed at step %d from memory: no checkpoint was read", metadata.step)
                return metadata
            in_memory.close()
        return None if on_disk is None else self.load()

    def _left_in_memory(self) -> RecoveredState | None:
        """What earlier workers of the job left, if the plan has copies and the launcher has started it again."""
        is_again = known_variables.whole_number("TORCHELASTIC_RESTART_COUNT") > 0
        if not is_again or self._engine.plan.checkpoint.replica_every_steps is None:
            return None
        return recover_kept(world_group())

    def load(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        strict: bool = True,
        model_only: bool = False,
    ) -> CheckpointMetadata:
        """Load the newest whole checkpoint under `path` or the plan's directory, or the one of `step`."""
        manager = self._manager(path)
        return self._load(manager, manager.open(step), strict=strict, model_only=model_only)

    def load_from(self, saved: SavedSnapshot, *, strict: bool = True, model_only: bool = False) -> CheckpointMetadata:
        """Load a state that is not in our own directory, such as another library's checkpoint; every rank calls."""
        return self._load(self._manager(None), saved, strict=strict, model_only=model_only)

    def restore(self, recovered: RecoveredState) -> CheckpointMetadata:
        """Load what `recover` put together from the ranks' memory, in place; every rank calls this."""
        try:
            return self._load(self._manager(None), recovered, strict=True, model_only=False)
        finally:
            recovered.close()

    def _load(
        self, manager: CheckpointManager, saved: SavedSnapshot, *, strict: bool, model_only: bool
    ) -> CheckpointMetadata:
        engine = self._engine
        if not model_only and "engine" not in saved.values:
            raise CheckpointError(
                f"{Path(saved.place).name} holds no Engine's state: a CheckpointManager of one's own loop saved it",
                hint="load the model alone with model_only=True, or load it with CheckpointManager",
            )
        keys = [MODEL] if model_only else [MODEL, OPTIMIZER]
        further = engine.strategy.shared_names()
        saved.alias({f"{MODEL}.{name}": f"{MODEL}.{first}" for name, first in further.items()})
        manager.fit(saved, engine.strategy.held_state(engine.optimizer), keys, strict=strict)
        with fail_together("load the checkpoint", world_group()), understood(saved):
            engine.strategy.load_held_state(engine.optimizer, saved, with_optimizer=not model_only)
        with understood(saved):
            if not model_only:
                self._take_values(saved.values["engine"])
            own = manager.loaded(saved, with_generators=not model_only, seed=engine.plan.training.seed)
            if own is not None and not model_only and _place(engine.plan) == own["place"]:
                engine.strategy.load_state_dict(own["strategy"])
        return saved.metadata

    def _take_values(self, values: dict[str, Any]) -> None:
        engine = self._engine
        engine.precision.load_state_dict(values["precision"])
        engine.learning_rate.load_state_dict(values["learning_rate"], data_degree=engine.strategy.data_degree)
        engine.num_steps, engine.num_skipped = values["num_steps"], values["num_skipped"]
        engine.ledger.load_state_dict(values)

    def _save(
        self, manager: CheckpointManager, reason: str, loss: float | None, *, leave_out: Collection[str] = ()
    ) -> None:
        state = self._state()
        if leave_out:
            unwanted = {f"{MODEL}.{name}" for name in leave_out}
            state.tensors = [held for held in state.tensors if held.name not in unwanted]
        manager.save_held(self._engine.num_steps, state, reason, own=self._own(), **self._facts(loss))

    def _replicate(self, replicas: NeighbourReplicas, loss: float | None) -> None:
        manager, step = self._manager(None), self._engine.num_steps
        metadata = manager.metadata_of(step, "replica", **self._facts(loss))
        replicas.update(self._state(), {"random": random_state(), **self._own()}, metadata)

    def _state(self) -> HeldState:
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
        pretrained = run_facts.pretrained_facts(engine.strategy.whole_model, engine.strategy.shared_names)
        if pretrained is not None:
            state.values[run_facts.PRETRAINED] = {MODEL: pretrained}
        return state

    def _own(self) -> dict[str, Any]:
        """This rank's own values, beside its generators."""
        return {"place": _place(self._engine.plan), "strategy": self._engine.strategy.state_dict()}

    def _facts(self, loss: float | None) -> dict[str, Any]:
        rates = [float(group["lr"]) for group in self._engine.optimizer.param_groups]
        return {"loss": loss, "epoch": self._engine.ledger.epoch, "learning_rate": rates[0] if rates else None}

    def _neighbours(self) -> NeighbourReplicas | None:
        if world_group() is None:
            _log.warning("checkpoint.replica_every_steps has no effect: there is no other rank to keep a copy")
            return None
        return NeighbourReplicas()

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
