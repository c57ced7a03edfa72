"""Which checkpoint to load, and whether it fits: all ranks verify it together and take the same one."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.checkpoint.files.checkpoint_directory import CheckpointDirectory
from torsh_distributed.checkpoint.files.manifest import MARKER, read_manifest
from torsh_distributed.checkpoint.files.mapped_file import MappedFile
from torsh_distributed.checkpoint.files.verification import find_damage
from torsh_distributed.checkpoint.loading.saved_checkpoint import SavedCheckpoint
from torsh_distributed.checkpoint.loading.saved_snapshot import SavedSnapshot
from torsh_distributed.checkpoint.saving.file_exchange import FileExchange
from torsh_distributed.checkpoint.saving.node_ranks import NodeRanks, first_ranks, gathered
from torsh_distributed.checkpoint.saving.remote_mirror import RemoteMirror
from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.errors import CheckpointError, TorshError
from torsh_distributed.parallel.state.held_state import SavedTensor
from torsh_distributed.parallel.state.held_tensors import HeldTensor
from torsh_distributed.unreadable_data import unreadable_as

_log = logging.getLogger(__name__)


def world_group() -> dist.ProcessGroup | None:
    """The world's group; None if this process is alone."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


@dataclass(frozen=True)
class CheckpointTiers:
    """Where a step may be beside the directory itself: on other nodes, and in a remote place."""

    nodes: NodeRanks
    mirror: RemoteMirror | None
    hold_directory: Callable[[], None]
    """Takes the directory's lock, on every rank, before anything is fetched into it."""

    @property
    def per_node(self) -> bool:
        """Whether each node has a directory of its own."""
        return not self.nodes.has_one_directory


def known_steps(path: Path, tiers: CheckpointTiers | None) -> tuple[list[int], set[int]]:
    """Steps in the directory, or in any node's, newest first, and those in the remote place; every rank calls this.

    A remote place that cannot be reached is reported; it raises if there is nothing else to load from.
    """
    group = world_group()
    mine = CheckpointDirectory(path).steps()
    if tiers is not None and tiers.per_node:
        local = {step for theirs in gathered(mine, group) for step in theirs}
    else:
        local = set(first_ranks(mine, group))
    if tiers is None or tiers.mirror is None:
        return sorted(local, reverse=True), set()
    remote: list[int] = []
    with fail_together("list the remote checkpoints", group):
        if tiers.nodes.rank == 0:
            try:
                remote = tiers.mirror.steps()
            except TorshError as error:
                if not local:
                    raise
                _log.warning("%s; only %s is looked at", error.message, path)
    return sorted(local, reverse=True), set(first_ranks(remote, group))


def open_newest(
    path: str | os.PathLike[str], *, step: int | None = None, tiers: CheckpointTiers | None = None
) -> SavedCheckpoint:
    """The newest checkpoint that is whole under `path` or in another tier, the one of `step`, or `path` itself.

    Every rank calls this and verifies a share of the files. A damaged checkpoint is named, with the file and the bytes,
    in a warning and an event; it is fetched from another tier if one has it, else the next older one is taken. If one
    was asked for by name, it raises. All ranks raise alike.
    """
    place, group = Path(path), world_group()
    if step is None and first_ranks((place / MARKER).exists(), group):
        found = _verified(place, group, is_step=False)
        if isinstance(found, SavedCheckpoint):
            return found
        raise CheckpointError(found, hint="copy the files again from where they were stored", path=str(path))
    local, remote = known_steps(place, tiers)
    steps = [one for one in sorted({*local, *remote}, reverse=True) if step in (None, one)]
    if not steps:
        raise CheckpointError(
            f"there is no checkpoint in {path}" if step is None else f"there is no checkpoint of step {step} in {path}",
            hint="`torsh checkpoint ls DIR` lists what a directory has",
        )
    is_chosen = step is not None or len(steps) == 1
    problems = []
    for one in steps:
        found = _from_any_tier(CheckpointDirectory(place), one, tiers, is_local=one in local, is_remote=one in remote)
        if isinstance(found, SavedCheckpoint):
            return found
        problems.append(found)
        if not is_chosen:
            _warn(CheckpointDirectory(place).step_path(one), found, "trying the next older checkpoint")
    raise CheckpointError(
        problems[0] if is_chosen else f"no checkpoint in {path} is whole: " + "; ".join(problems),
        hint="copy the files again from where they were stored, or start from step 0",
        path=str(path),
    )


def _from_any_tier(
    directory: CheckpointDirectory, step: int, tiers: CheckpointTiers | None, *, is_local: bool, is_remote: bool
) -> SavedCheckpoint | str:
    """A step from the directory, made whole from other tiers if need be; or what is wrong with it, on every rank."""
    path, group = directory.step_path(step), world_group()
    per_node = tiers is not None and tiers.per_node
    found: SavedCheckpoint | str = f"{path.name} is not here"
    if is_local and not per_node:
        found = _verified(path, group)
    if isinstance(found, SavedCheckpoint) or tiers is None or not (per_node or is_remote):
        return found
    if is_local and not per_node:
        _warn(path, found, "fetching it from the remote place")
    tiers.hold_directory()
    exchange = FileExchange(directory, tiers.nodes, group, tiers.mirror)
    problem = exchange.complete(step, is_remote=is_remote)
    return _verified(path, group, tiers.nodes) if problem is None else problem


def _verified(
    path: Path, group: dist.ProcessGroup | None, nodes: NodeRanks | None = None, *, is_step: bool = True
) -> SavedCheckpoint | str:
    """The checkpoint, or what is wrong with it; the same on every rank. A newer format raises.

    `is_step`: the path is a directory's own step, which may not be a link; one that the user named may.
    """
    part, num_parts = (0, 1) if group is None else (group.rank(), group.size())
    if nodes is not None:
        part, num_parts = nodes.position, len(nodes.members)
    problem: str | None = None
    is_newer, saved = False, None
    try:
        if is_step and path.is_symlink():
            raise CheckpointError(f"{path.name} is a symbolic link, which is not followed: name its target instead")
        manifest = read_manifest(path)
        opened: dict[str, MappedFile] = {}
        damage = find_damage(path, manifest, part=part, num_parts=num_parts, opened=opened)
        if damage:
            shown = "; ".join(str(one) for one in damage[:3])
            problem = f"{path.name} is damaged: {shown}" + ("; …" if len(damage) > 3 else "")
        else:
            saved = SavedCheckpoint(path, manifest, opened)
    except CheckpointError as error:
        problem, is_newer = error.message, "newer_format" in error.context
    answers = gathered([problem, is_newer], group)
    texts = list(dict.fromkeys(text for text, _ in answers if text is not None))
    if any(newer for _, newer in answers):
        # Not skipped: an older step would throw away what the newer version has trained.
        raise CheckpointError(texts[0], hint="upgrade torsh-distributed to load it, or name an older step")
    if texts or saved is None:
        return "; ".join(texts)
    return saved


def _warn(path: Path, problem: str, then: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning("%s; %s", problem, then)
    step = int(path.name.removeprefix("step-"))
    events.emit(events.CheckpointEvent(action="damaged", path=str(path), step=step, error=problem))


def differences(held: Sequence[HeldTensor], saved: Mapping[str, SavedTensor], keys: Sequence[str]) -> dict[str, str]:
    """Name to how what the ranks hold differs from what was saved under `keys`; every rank calls this.

    Names that are missing come with the most similar one that the other side has.
    """
    mine = {one.name: (list(one.layout.shape), str(one.dtype)) for one in held if not _is_of_optimizer(one.name)}
    group = world_group()
    everyone = gathered(mine, group)
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


def refuse_other_optimizer(place: str, held: Mapping[str, Any], saved: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise CheckpointError if an optimizer under `keys` has other groups than the saved one; values by key.

    Before anything is loaded: a model with an optimizer that does not belong to it is worth less than an error.
    """
    for key in keys:
        mine, theirs = _groups(held.get(key)), _groups(saved.get(key))
        if mine is None or theirs is None or mine == theirs:
            continue
        here, there = set().union(*mine), set().union(*theirs)
        differing = [f"{name} is here alone" for name in sorted(here - there)]
        differing += [f"{name} is in the checkpoint alone" for name in sorted(there - here)]
        raise CheckpointError(
            f"{Path(place).name} is of an optimizer with other parameters or groups: "
            + (
                "; ".join(differing[:5])
                or f"{len(mine)} groups here, {len(theirs)} in the checkpoint, of the same ones"
            ),
            hint="build the optimizer as it was when the checkpoint was saved, or load the model alone",
            path=place,
            num_differing=len(differing) or None,
        )


def understood(saved: SavedSnapshot) -> AbstractContextManager[None]:
    """Around what puts saved values in their places: one that does not belong there is a CheckpointError."""
    return unreadable_as(
        CheckpointError,
        f"{Path(saved.place).name} holds values that cannot be loaded",
        hint="load another step; if one cannot be loaded, the program may not be the one that saved it",
        path=saved.place,
    )


def _groups(value: Any) -> list[set[str]] | None:
    """The parameters of each group, if a saved value is an optimizer's."""
    if not isinstance(value, Mapping) or not {"param_groups", "plain"} <= value.keys():
        return None
    return [set(group["params"]) for group in value["param_groups"]]


def refuse(place: str, found: Mapping[str, str]) -> None:
    """Raise CheckpointError with every difference, if there are any."""
    if found:
        lines = "\n".join(f"    {name} {text}" for name, text in found.items())
        raise CheckpointError(
            f"{Path(place).name} is not of this model: {len(found)} differences\n{lines}",
            hint="build the model as it was when it was saved, or load what fits with strict=False",
            path=place,
        )


def _is_of_optimizer(name: str) -> bool:
    """An optimizer's state appears with its first step, so what is there now says nothing."""
    return name.partition(".")[2].startswith("state.")


def _nearest(name: str, others: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, others, n=1)
    return f"; the most similar there is {close[0]}" if close else ""
