"""Which checkpoint to load, and whether it fits: all ranks verify it together and take the same one."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.checkpoint.files.checkpoint_directory import CheckpointDirectory
from torsh_distributed.checkpoint.files.manifest import MARKER, read_manifest
from torsh_distributed.checkpoint.files.verification import find_damage
from torsh_distributed.checkpoint.saving.saved_checkpoint import SavedCheckpoint
from torsh_distributed.comm.collectives.objects import all_gather_object, broadcast_object
from torsh_distributed.errors import CheckpointError
from torsh_distributed.parallel.state.held_state import SavedTensor
from torsh_distributed.parallel.state.held_tensors import HeldTensor

_log = logging.getLogger(__name__)


def world_group() -> dist.ProcessGroup | None:
    """The world's group; None if this process is alone."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def open_newest(path: str | os.PathLike[str], *, step: int | None = None) -> SavedCheckpoint:
    """The newest checkpoint under `path` that is whole, the one of `step`, or `path` itself; every rank calls this.

    Each rank verifies a share of the files. A damaged checkpoint is named, with the file and the bytes, in a warning
    and an event, and the next older one is taken; if one was asked for by name, it raises. All ranks raise alike.
    """
    group = world_group()
    candidates = _candidates(Path(path), step) if group is None or group.rank() == 0 else []
    if group is not None:
        candidates = broadcast_object(candidates, dist.get_global_rank(group, 0), group=group)
    if not candidates:
        raise CheckpointError(
            f"there is no checkpoint in {path}" if step is None else f"there is no checkpoint of step {step} in {path}",
            hint="`torsh checkpoint ls DIR` lists what a directory has",
        )
    is_chosen = step is not None or len(candidates) == 1
    problems = []
    for name in candidates:
        found = _verified(Path(name), group)
        if isinstance(found, SavedCheckpoint):
            return found
        problems.append(found)
        if not is_chosen:
            _warn(Path(name), found)
    raise CheckpointError(
        problems[0] if is_chosen else f"no checkpoint in {path} is whole: " + "; ".join(problems),
        hint="copy the files again from where they were stored, or start from step 0",
        path=str(path),
    )


def _candidates(path: Path, step: int | None) -> list[str]:
    """Directories to try, newest first."""
    if (path / MARKER).exists() and step is None:
        return [str(path)]
    directory = CheckpointDirectory(path)
    steps = directory.steps() if step is None else [one for one in directory.steps() if one == step]
    return [str(directory.step_path(one)) for one in steps]


def _verified(path: Path, group: dist.ProcessGroup | None) -> SavedCheckpoint | str:
    """The checkpoint, or what is wrong with it; the same on every rank. A newer format raises."""
    part, num_parts = (0, 1) if group is None else (group.rank(), group.size())
    problem: str | None = None
    is_newer, saved = False, None
    try:
        manifest = read_manifest(path)
        damage = find_damage(path, manifest, part=part, num_parts=num_parts)
        if damage:
            shown = "; ".join(str(one) for one in damage[:3])
            problem = f"{path.name} is damaged: {shown}" + ("; …" if len(damage) > 3 else "")
        else:
            saved = SavedCheckpoint(path, manifest)
    except CheckpointError as error:
        problem, is_newer = error.message, "newer_format" in error.context
    answers: list[Any] = [[problem, is_newer]] if group is None else all_gather_object([problem, is_newer], group=group)
    texts = list(dict.fromkeys(text for text, _ in answers if text is not None))
    if any(newer for _, newer in answers):
        # Not skipped: an older step would throw away what the newer version has trained.
        raise CheckpointError(texts[0], hint="upgrade torsh-distributed to load it, or name an older step")
    if texts or saved is None:
        return "; ".join(texts)
    return saved


def _warn(path: Path, problem: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning("%s; trying the next older checkpoint", problem)
    step = int(path.name.removeprefix("step-"))
    events.emit(events.CheckpointEvent(action="damaged", path=str(path), step=step, error=problem))


def differences(held: Sequence[HeldTensor], saved: Mapping[str, SavedTensor], keys: Sequence[str]) -> dict[str, str]:
    """Name to how what the ranks hold differs from what was saved under `keys`; every rank calls this.

    Names that are missing come with the most similar one that the other side has.
    """
    mine = {one.name: (list(one.layout.shape), str(one.dtype)) for one in held if not _is_of_optimizer(one.name)}
    group = world_group()
    everyone = [mine] if group is None else all_gather_object(mine, group=group)
    wanted = {name: kind for theirs in everyone for name, kind in theirs.items()}
    given = {
        name: kind for name, kind in saved.items() if name.partition(".")[0] in keys and not _is_of_optimizer(name)
    }
    absent, unknown = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    found: dict[str, str] = {}
    for name in absent:
        found[name] = "is not in the checkpoint" + _nearest(name, unknown)
    for name in unknown:
        found[name] = "is in the checkpoint, but not in the model" + _nearest(name, absent)
    for name, (shape, dtype) in sorted(wanted.items()):
        if name not in given:
            continue
        kind = given[name]
        if tuple(shape) != kind.shape:
            found[name] = f"has shape {tuple(shape)} here and {kind.shape} in the checkpoint"
        elif dtype != str(kind.dtype):
            found[name] = f"is {dtype} here and {kind.dtype} in the checkpoint"
    return found


def refuse(path: Path, found: Mapping[str, str]) -> None:
    """Raise CheckpointError with every difference, if there are any."""
    if found:
        lines = "\n".join(f"    {name} {text}" for name, text in found.items())
        raise CheckpointError(
            f"{path.name} is not of this model: {len(found)} differences\n{lines}",
            hint="build the model as it was when it was saved, or load what fits with strict=False",
            path=str(path),
        )


def _is_of_optimizer(name: str) -> bool:
    """An optimizer's state appears with its first step, so what is there now says nothing."""
    return name.partition(".")[2].startswith("state.")


def _nearest(name: str, others: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, others, n=1)
    return f"; the most similar there is {close[0]}" if close else ""
