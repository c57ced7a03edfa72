"""Checkpoints of a training loop: when to save, where to, which to keep, and how to come back."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.checkpoint import run_facts
from torsh_distributed.checkpoint.files.block_hashes import FileDamage
from torsh_distributed.checkpoint.files.checkpoint_directory import CheckpointDirectory, StepLoss, steps_to_remove
from torsh_distributed.checkpoint.files.manifest import CheckpointMetadata, read_manifest
from torsh_distributed.checkpoint.files.verification import find_damage
from torsh_distributed.checkpoint.loading.restoring import (
    CheckpointTiers,
    differences,
    known_steps,
    open_newest,
    refuse,
    refuse_other_optimizer,
    understood,
    world_group,
)
from torsh_distributed.checkpoint.loading.saved_checkpoint import SavedCheckpoint
from torsh_distributed.checkpoint.loading.saved_snapshot import SavedSnapshot
from torsh_distributed.checkpoint.random_generators import random_state, reseed, restore_random_state
from torsh_distributed.checkpoint.run_facts import describe, further_names, restore
from torsh_distributed.checkpoint.save_policy import (
    FAILURE,
    PreemptionSignals,
    SaveDecision,
    SaveTriggers,
)
from torsh_distributed.checkpoint.saving.checkpoint_uploads import CheckpointUploads
from torsh_distributed.checkpoint.saving.checkpoint_writer import CheckpointWriter
from torsh_distributed.checkpoint.saving.node_ranks import NodeRanks, first_ranks
from torsh_distributed.checkpoint.saving.remote_mirror import PATIENT, RemoteMirror
from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.groups.process_group import before_destroy
from torsh_distributed.errors import CheckpointError
from torsh_distributed.parallel.state.held_state import HeldState
from torsh_distributed.plan import CheckpointConfig, RetryConfig

_log = logging.getLogger(__name__)


class LoadedCheckpoint(NamedTuple):
    """What was loaded: the checkpoint's metadata, and the plain values that were given with names."""

    metadata: CheckpointMetadata
    values: dict[str, Any]


class CheckpointManager:
    """Saves and loads the state of a training loop; every rank makes one and makes the same calls.

        with CheckpointManager(CheckpointConfig(dir="checkpoints", every_steps=100)) as manager:
            state = {"model": model, "optimizer": optimizer, "sampler": sampler}
            found = manager.resume(state)
            for step in range(0 if found is None else found.metadata.step, steps):
                ...
                manager.after_step(step + 1, state, loss=loss)

    State is modules, optimizers, objects with `state_dict` and `load_state_dict`, and plain values; random generators
    are kept too. Modules and optimizers may be sharded (FSDP2): each rank writes and reads its own part. All ranks give
    the same names; values that are not tensors are those of rank 0.
    """

    def __init__(
        self,
        config: CheckpointConfig | str | os.PathLike[str],
        *,
        facts: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        retry: RetryConfig | None = None,
    ) -> None:
        self.config = config if isinstance(config, CheckpointConfig) else CheckpointConfig(dir=os.fspath(config))
        self.directory = CheckpointDirectory(self.config.dir)
        self._facts = dict(facts or {})
        self._signals = PreemptionSignals()
        self._triggers = SaveTriggers(
            self.directory.path,
            every_steps=self.config.every_steps,
            every_s=self.config.every_s,
            signals=self._signals,
            device=device,
        )
        # A section that says nothing leaves uploads the patience that they need.
        policy = PATIENT if retry is None or retry == RetryConfig() else retry
        mirror = None if self.config.remote is None else RemoteMirror(self.config.remote, policy)
        nodes = NodeRanks.meet(world_group(), per_node=self.config.per_node)
        self._uploads = (
            None if mirror is None else CheckpointUploads(mirror, rank=nodes.rank, to_remove=self._steps_to_remove)
        )
        self._writer = CheckpointWriter(
            self.directory,
            nodes=nodes,
            compression_level=self.config.compression_level,
            verify=self.config.verify_after_save,
            prune=self._prune,
            uploads=self._uploads,
        )
        self._tiers = CheckpointTiers(nodes, mirror, self._writer.hold_directory)
        self._unsubscribe: Callable[[], None] | None = None
        self._forget = before_destroy(self.close)
        atexit.register(self.close)
        self._is_training = self._is_closed = False

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.close()

    def watch(self) -> None:
        """Until `close`: save and end the job at SIGTERM, SIGUSR1 or Ctrl-C, and save when an alert is critical."""
        self._signals.watch()
        self._unsubscribe = events.subscribe(self._on_alert, events.AlertEvent)

    def after_step(self, step: int, state: Mapping[str, Any], *, loss: float | None = None) -> bool:
        """Save if it is time to; every rank calls this after every step. Returns whether it did.

        After a signal the state is saved, and SystemExit with code 75 ends every rank.
        """
        decision = self.decide(step)
        if decision is not None:
            self._save(step, describe(state), decision.reason, loss=loss)
            self.end_if_told(decision)
        return decision is not None

    def decide(self, step: int, *, raises_failures: bool = True) -> SaveDecision | None:
        """Whether to save now, on all ranks alike; every rank calls this after every step.

        A save that has failed in the background is raised about a second later, on all ranks, unless `raises_failures`
        is false: then it is the next save that raises it.
        """
        self.hold()
        decision = self._triggers.after_step(step, has_failed=raises_failures and self._writer.has_failed)
        if decision is not None and decision.reason == FAILURE:
            self.wait()
            return None
        if decision is not None and decision.is_last:
            failure = self.take_failure()  # there may be room by now, and no later save to try
            if failure is not None:
                _log.warning("%s; the job ends, so its state is saved once more", failure.message)
        return decision

    def hold(self) -> None:
        """Training begins: until `close` the directory is this job's, and a second job is refused here.

        Every rank calls this. `resume` does it, and the first step at the latest.
        """
        if not self._is_training:
            self._writer.hold_directory()
            self._is_training = True

    def end_if_told(self, decision: SaveDecision) -> None:
        """After the save of a `decision`: end this process if a signal asked for it."""
        if decision.is_last:
            self.wait()
            name = "a signal" if self._signals.received is None else self._signals.received.name
            _log.warning("saved and ending after %s", name)
            raise SystemExit(self._signals.exit_code)

    def save(self, step: int, state: Mapping[str, Any], *, loss: float | None = None, wait: bool = True) -> None:
        """Save now. With `wait`, returns once the checkpoint is on the disk; else once it is copied into memory."""
        self._save(step, describe(state), "asked", loss=loss)
        if wait:
            self._writer.wait_for_commit()

    def save_if_best(self, step: int, state: Mapping[str, Any], metric: float) -> bool:
        """Save if rank 0's `metric` is lower than all before; returns whether it did, on every rank alike."""
        if not self.is_best(metric):
            return False
        self._save(step, describe(state), "best", loss=metric)
        return True

    def save_held(
        self, step: int, state: HeldState, reason: str, *, own: Mapping[str, Any] | None = None, **facts: Any
    ) -> None:
        """Save a state that is described already; `own` are this rank's own values beside its generators."""
        self._save(step, state, reason, own=own, **facts)

    def metadata_of(self, step: int, reason: str, **facts: Any) -> CheckpointMetadata:
        """What is known of a state that is saved now."""
        return CheckpointMetadata(
            step=step,
            time=time.time(),
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            git_commit=run_facts.git_commit(),
            versions=run_facts.versions(),
            reason=reason,
            **{**self._facts, **facts},
        )

    def is_best(self, metric: float) -> bool:
        """Whether rank 0's `metric` is lower than all before; it counts from now on. Every rank calls this."""
        return self._triggers.is_best(first_ranks(metric, world_group()))

    @property
    def is_writing(self) -> bool:
        """Whether a save is still being written to the directory in the background."""
        return self._writer.is_writing

    def wait(self) -> None:
        """Wait until nothing is being written or uploaded; raises on every rank if anything failed."""
        self._writer.wait()
        if self._uploads is not None:
            self._uploads.wait()

    def ask(self) -> None:
        """Save at the next exchange of the ranks; any rank may call this, from any thread."""
        self._triggers.ask()

    def use_intervals(self, *, every_steps: int, every_s: float | None) -> None:
        """Save at other intervals from now on; every rank calls this between steps."""
        self.config = self.config.replace(every_steps=every_steps, every_s=every_s)
        self._triggers.use_intervals(every_steps=every_steps, every_s=every_s)

    def take_failure(self) -> CheckpointError | None:
        """Wait until nothing is being written; what failed after the last commit, which is then not raised."""
        return self._writer.take_failure()

    def wait_for_commit(self) -> Path | None:
        """Wait until the last checkpoint is published, though older ones may still have to go."""
        return self._writer.wait_for_commit()

    def resume(self, state: Mapping[str, Any], **options: Any) -> LoadedCheckpoint | None:
        """Begin training: `hold` the directory, `load` its newest checkpoint if there is one; None if it has none."""
        self.hold()
        return self.load(state, **options) if self.newest_step() is not None else None

    def newest_step(self) -> int | None:
        """Of what there is to load, here, on another node or in the remote place; every rank calls this."""
        local, remote = known_steps(self.directory.path, self._tiers)
        return max((*local, *remote), default=None)

    def open(self, step: int | None = None) -> SavedCheckpoint:
        """The newest checkpoint that is whole in any tier, or the one of `step`; every rank calls this."""
        return open_newest(self.directory.path, step=step, tiers=self._tiers)

    def load(self, state: Mapping[str, Any], *, step: int | None = None, strict: bool = True) -> LoadedCheckpoint:
        """Load the newest checkpoint that is whole, or the one of `step`, in place; every rank calls this.

        Differences of names, shapes and dtypes raise, all at once; with `strict=False` they are warnings, and what fits
        is loaded. To fine-tune, give the module alone: what is not given is not loaded.
        """
        saved = self.open(step)
        saved.alias(further_names(state))
        self.fit(saved, describe(state), list(state), strict=strict)
        with fail_together("load the checkpoint", world_group()), understood(saved):
            values = restore(state, saved)
        self.loaded(saved, with_generators=True)
        return LoadedCheckpoint(saved.metadata, values)

    def fit(self, saved: SavedSnapshot, state: HeldState, keys: Sequence[str], *, strict: bool) -> None:
        """Compare what was saved under `keys` with what the ranks hold; every rank calls this. Nothing is loaded."""
        found = differences(state.tensors, saved.tensors, keys)
        if strict:
            refuse(saved.place, found)
        with fail_together("load the checkpoint", world_group()), understood(saved):
            refuse_other_optimizer(saved.place, state.values, saved.values, keys)
        for name, text in found.items():
            if world_group() is None or dist.get_rank() == 0:
                _log.warning("not loaded: %s %s", name, text)
        saved.tensors = {name: kind for name, kind in saved.tensors.items() if name not in found}

    def loaded(self, saved: SavedSnapshot, *, with_generators: bool, seed: int = 0) -> Any:
        """Restore this rank's generators, or seed them if the world has another size; returns the rank's own values."""
        metadata = saved.metadata
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        own = saved.own_values(rank) if metadata.world_size == size else None
        if with_generators and own is not None:
            with understood(saved):
                restore_random_state(own["random"])
        elif with_generators:
            reseed(seed + metadata.step + rank)
        self._triggers.resumed(saved.values.get("_best"))
        action = saved.load_action if with_generators else "model loaded"
        events.emit(
            events.CheckpointEvent(action=action, path=saved.place, step=metadata.step, num_bytes=saved.num_bytes)
        )
        return own

    def list(self) -> Sequence[CheckpointMetadata]:
        """Complete checkpoints, newest first; their files are not verified. One that cannot be read is left out."""
        return [*self._complete().values()]

    def _complete(self) -> dict[int, CheckpointMetadata]:
        """By the step in the directory's name, which is another than the metadata's if somebody renamed it."""
        found = {}
        for step in self.directory.complete_steps():
            try:
                found[step] = read_manifest(self.directory.step_path(step)).metadata
            except CheckpointError as error:
                _log.warning("%s", error.message)
        return found

    def verify(self, step: int) -> Sequence[FileDamage]:
        """What is damaged in a checkpoint; empty if nothing is. Reads all of it, on this rank alone."""
        path = self.directory.step_path(step)
        return find_damage(path, read_manifest(path))

    def close(self) -> None:
        """Finish what is being written and let other jobs use the directory; raises if it failed."""
        if not self._is_closed:
            uploads = [] if self._uploads is None else [self._uploads.close]
            self._close(*uploads, self._writer.close)

    def abandon(self, reason: str) -> None:
        """Like `close`, after a rank was lost: what is being written is given up, without waiting for that rank."""
        if self._uploads is not None:
            self._uploads.abandon(reason)
        self._writer.abandon(reason)
        self._close()

    def _close(self, *ends: Callable[[], None]) -> None:
        self._is_closed = True
        self._forget()
        atexit.unregister(self.close)
        self._signals.stop()
        if self._unsubscribe is not None:
            self._unsubscribe()
        with ExitStack() as stack:
            for end in ends:
                stack.callback(end)

    def _save(
        self,
        step: int,
        state: HeldState,
        reason: str,
        *,
        own: Mapping[str, Any] | None = None,
        loss: float | None = None,
        **facts: Any,
    ) -> None:
        metadata = self.metadata_of(step, reason, loss=loss, **facts)
        state.values["_best"] = self._triggers.best
        self._writer.save(state, {"random": random_state(), **(own or {})}, metadata)
        self._triggers.saved()
        if not self.config.async_save:
            self._writer.wait_for_commit()

    def _prune(self, saved: int) -> None:
        """On the keeper of a directory, after the save of a step."""
        found = {step: one.loss for step, one in self._complete().items()}
        waiting = set() if self._uploads is None else self._uploads.pending
        for step in self._steps_to_remove(found, saved):
            if step not in waiting:
                self.directory.remove(step)

    def _steps_to_remove(self, losses: Mapping[int, float | None], saved: int) -> Sequence[int]:
        """Of one tier, after the save of a step: steps that it does not keep."""
        config, found = self.config, [StepLoss(step, loss) for step, loss in losses.items()]
        return steps_to_remove(
            found, keep=config.keep, keep_best=config.keep_best, keep_every=config.keep_every, saved=saved
        )

    def _on_alert(self, event: events.Event) -> None:
        assert isinstance(event, events.AlertEvent)
        if event.severity == "critical":
            self._triggers.ask()
