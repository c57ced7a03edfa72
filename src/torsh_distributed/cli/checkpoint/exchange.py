"""The commands of `torsh checkpoint` that read tensors, and so need torch."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from torsh_distributed.checkpoint.checkpoint_manager import CheckpointManager
from torsh_distributed.checkpoint.files.block_hashes import Progress, damaged
from torsh_distributed.checkpoint.files.manifest import Manifest
from torsh_distributed.checkpoint.files.verification import find_damage
from torsh_distributed.checkpoint.loading.saved_checkpoint import SavedCheckpoint
from torsh_distributed.checkpoint.safetensors_files import export, model_in
from torsh_distributed.terminal_text import neutral


def print_differences(one: SavedCheckpoint, other: SavedCheckpoint) -> bool:
    """Print how two checkpoints differ; returns whether they do."""
    console = Console(soft_wrap=True, highlight=False)
    num_equal = num_different = 0
    for name in sorted({*one.tensors, *other.tensors}):
        text = _difference(name, one, other)
        num_equal, num_different = num_equal + (text is None), num_different + (text is not None)
        if text is not None:
            console.print(neutral(f"{name}: {text}"), markup=False)
    console.print(f"{num_equal} tensors are equal, {num_different} differ")
    return num_different > 0


def _difference(name: str, one: SavedCheckpoint, other: SavedCheckpoint) -> str | None:
    """How a tensor differs between two checkpoints, in words; None if every bit is equal."""
    kinds = [saved.tensors.get(name) for saved in (one, other)]
    first, second = ("absent" if kind is None else f"{kind.dtype} {tuple(kind.shape)}" for kind in kinds)
    if first != second:
        return f"{first} in the first, {second} in the second"
    left, right = one.whole(name), other.whole(name)
    if torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8)):
        return None
    largest = float((left.double() - right.double()).abs().max())
    return f"{int((left != right).sum())} of {left.numel()} elements differ, by at most {largest:.3g}"


def export_model(
    path: Path, manifest: Manifest, out: Path, *, key: str, shard_bytes: int, progress: Progress
) -> list[Path]:
    """Write the model as safetensors files; of a damaged checkpoint, nothing."""
    return export(verified(path, manifest, progress), out, key=key, shard_bytes=shard_bytes, progress=progress)


def verified(path: Path, manifest: Manifest, progress: Progress) -> SavedCheckpoint:
    """A checkpoint to read from, once every byte of it has been compared with what was written."""
    damage = find_damage(path, manifest, progress=progress)
    if damage:
        raise damaged(path, damage)
    return SavedCheckpoint(path, manifest)


def import_files(source: Path, directory: Path, progress: Progress) -> Path:
    """Save the model in safetensors files as step 0 of a directory."""
    state = model_in(source, progress)
    with CheckpointManager(directory) as manager:
        manager.save_held(0, state, "imported")
        manager.wait_for_commit()
        return manager.directory.step_path(0)
