"""Checkpoints under tags: `save_dir/tag/`, and `save_dir/latest` with the newest tag.

A tag's directory holds our checkpoint (sharded, hashed, readable at any world size) and what an engine keeps
beside it. A directory that DeepSpeed itself wrote is read as well.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from torsh_distributed.checkpoint.loading.restoring import world_group
from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.collectives.moves import barrier
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import CheckpointError, first_line
from torsh_distributed.migrate.deepspeed.checkpoints.conversion import load_deepspeed
from torsh_distributed.migrate.deepspeed.checkpoints.deepspeed_state import CheckpointFacts
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.moe.expert_modules import as_stacked, stacks_of
from torsh_distributed.migrate.deepspeed.training.loss_scales import LossScaler
from torsh_distributed.migrate.deepspeed.training.master_weights import MasterWeights
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings
from torsh_distributed.migrate.deepspeed.training.untrained_model import NoOptimizer
from torsh_distributed.migrate.deepspeed.zero.whole_between_steps import whole_weights
from torsh_distributed.parallel.state import whole_state
from torsh_distributed.train.checkpointing import EngineCheckpoints
from torsh_distributed.train.engine import Engine

_log = logging.getLogger(__name__)

LATEST = "latest"
_STATE = "engine_state_rank{rank}.pt"
SHARED = "shared"
"""Where an engine's file says which names are one tensor: every further name to the first."""
_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_SCRIPT = '''"""Writes the weights of the newest checkpoint here as fp32: zero_to_fp32.py . OUTPUT [--tag TAG]"""

from torsh_distributed.migrate.deepspeed.zero.fp32_weights import main

main()
'''


class TaggedEngine(Protocol):
    """What of an engine is kept beside its Engine."""

    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int
    lr_scheduler: Any
    loaded_checkpoint_tag: str | None

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scale."""


class TaggedCheckpoints:
    """Saves and loads an engine under tags; every rank makes the same calls."""

    def __init__(self, core: Engine, settings: RunSettings) -> None:
        self._core, self._settings = core, settings

    def save(
        self,
        engine: TaggedEngine,
        directory: str | os.PathLike[str],
        *,
        tag: str | int | None,
        client_state: Mapping[str, Any],
        save_latest: bool,
        exclude: set[str],
    ) -> bool:
        """Write `directory/tag` without what `exclude` names of the model; the tag is the same on all ranks,
        or all raise."""
        name = self._agreed_tag(str(tag) if tag is not None else f"global_step{engine.global_steps}")
        place = Path(directory) / name
        with fail_together("save the checkpoint", world_group()):
            if process_group.rank() == 0:
                place.mkdir(parents=True, exist_ok=True)
        with _checkpoints_of(self._core) as checkpoints:
            checkpoints.save(place, leave_out=exclude)
        with fail_together("save the checkpoint", world_group()):
            if process_group.rank() == 0 or self._settings.stage == 3:
                _write(place / _STATE.format(rank=process_group.rank()), self._engine_state(engine, client_state))
        barrier()
        with fail_together("save the checkpoint", world_group()):
            if process_group.rank() == 0:
                (Path(directory) / "zero_to_fp32.py").write_text(_SCRIPT)
                if save_latest:
                    _replace(Path(directory) / LATEST, lambda path: path.write_text(name))
        barrier()
        return True

    def load(
        self,
        engine: TaggedEngine,
        directory: str | Path,
        *,
        tag: str | int | None,
        strict: bool,
        with_optimizer: bool,
        with_scheduler: bool,
        module_only: bool,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load `directory/tag`, or the newest; (None, None) if the directory names none."""
        name = str(tag) if tag is not None else _newest(Path(directory))
        if name is None:
            _log.warning("there is no file %s in %s: pass the tag, or nothing is loaded", LATEST, directory)
            return None, None
        place = Path(directory) / name
        if not place.is_dir():
            _log.warning("there is no checkpoint %s: nothing is loaded", place)
            return None, None
        with_optimizer = with_optimizer and not isinstance(self._core.optimizer, NoOptimizer)
        is_ours = any(place.glob(_STATE.format(rank="*")))
        if is_ours:
            with _checkpoints_of(self._core) as checkpoints:
                checkpoints.load(place, strict=strict, model_only=not with_optimizer)
            state = read_engine_state(place, process_group.rank())
        else:
            facts = load_deepspeed(self._core, directory, name, model_only=not with_optimizer, strict=strict)
            state = _state_from(facts, self._settings.batch.accumulation)
        if not with_optimizer:
            self._refresh_masters()
        if not module_only:
            for count in _COUNTS:
                setattr(engine, count, state["counts"][count])
            engine.loss_scaler.load_state_dict(state["loss_scaler"])
        if with_scheduler and engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
        engine.loaded_checkpoint_tag = name
        return str(place), dict(state["client_state"])

    def _agreed_tag(self, mine: str) -> str:
        """The tag of rank 0, under which all ranks save; what is done if others differ, the config says."""
        tags: list[str] = all_gather_object(mine)
        mode = str(self._settings.value("checkpoint.tag_validation", "Warn")).lower()
        if len(set(tags)) == 1 or mode == "ignore":
            return tags[0]
        text = f"[rank={process_group.rank()}] The checkpoint tag name '{mine}' is not consistent across all ranks."
        require(mode != "fail", text, hint="pass one tag on all ranks, such as the number of steps", tags=tags)
        _log.warning("%s All save under that of rank 0: %s", text, tags[0])
        return tags[0]

    def save_weights(self, path: Path, *, exclude: set[str]) -> bool:
        """Write the module's state as one file of torch.save; every rank calls this, rank 0 writes."""
        state = whole_weights(self._core.strategy, keeps=process_group.rank() == 0, exclude=exclude)
        with fail_together("save the model", world_group()):
            if process_group.rank() == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                _replace(path, lambda place: torch.save(state, place))
        return True

    def load_module(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load whole tensors, the same on all ranks; without `strict` names that differ keep their values."""
        strategy = self._core.strategy
        given = as_stacked(state, stacks_of(strategy.unwrapped))
        if not strict:
            held = dict(strategy.whole_tensors())
            given = {name: given.get(name, value) for name, value in held.items()}
        strategy.reshard()
        whole_state.load_model_state(strategy.whole_model, given, strategy.state_parts())
        self._refresh_masters()

    def _refresh_masters(self) -> None:
        if isinstance(self._core.optimizer, MasterWeights):
            self._core.optimizer.refresh_masters(self._core.strategy.state_parts().like)

    def _engine_state(self, engine: TaggedEngine, client_state: Mapping[str, Any]) -> dict[str, Any]:
        scheduler = engine.lr_scheduler
        return {
            SHARED: self._core.strategy.shared_names(),
            "counts": {count: getattr(engine, count) for count in _COUNTS},
            "loss_scaler": engine.loss_scaler.state_dict(),
            "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "client_state": dict(client_state),
        }


def _state_from(facts: CheckpointFacts, accumulation: int) -> dict[str, Any]:
    """What a checkpoint of DeepSpeed says of its engine, as ours keeps it."""
    return {
        "counts": {
            "global_steps": facts.global_steps,
            "global_samples": facts.global_samples,
            "skipped_steps": facts.skipped_steps,
            "micro_steps": facts.global_steps * accumulation,
        },
        "loss_scaler": dict(facts.loss_scaler),
        "lr_scheduler": facts.lr_scheduler,
        "client_state": dict(facts.client_state),
    }


class _checkpoints_of:  # noqa: N801 (used like a function)
    """The Engine's checkpoints for one save or load; other tags are other directories."""

    def __init__(self, core: Engine) -> None:
        self._checkpoints = EngineCheckpoints(core)

    def __enter__(self) -> EngineCheckpoints:
        return self._checkpoints

    def __exit__(self, *_: object) -> None:
        self._checkpoints.close()


def _newest(directory: Path) -> str | None:
    path = directory / LATEST
    tag = path.read_text(errors="replace").strip() if path.is_file() else None
    if tag is not None and Path(tag).name != tag:
        raise CheckpointError(f"{path} names {tag[:200]!r}, which is not a tag", hint="name one with tag=…")
    return tag


def _write(path: Path, state: Mapping[str, Any]) -> None:
    _replace(path, lambda place: torch.save(dict(state), place))


def read_engine_state(place: Path, rank: int = 0) -> dict[str, Any]:
    """A rank's own file if it has one, else that of the first rank; never a bare pickle."""
    path = place / _STATE.format(rank=rank)
    path = path if path.is_file() else place / _STATE.format(rank=0)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            raise CheckpointError("the engine's state cannot be read", path=str(path), reason=str(error)) from error
        raise CheckpointError(
            "client_state holds objects that are not read without leave",
            hint="allow their classes: torch.serialization.add_safe_globals([…])",
            path=str(path),
            reason=first_line(error),
        ) from error
    return found


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside the place and move there: readers see the old file or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    write(aside)
    aside.replace(path)
