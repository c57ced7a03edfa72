"""The commands of `torsh checkpoint` that read tensors, and so need torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torsh_distributed.checkpoint.checkpoint_manager import CheckpointManager
from torsh_distributed.checkpoint.files.manifest import Manifest
from torsh_distributed.checkpoint.safetensors_files import export, model_in
from torsh_distributed.checkpoint.saving.saved_checkpoint import SavedCheckpoint
from torsh_distributed.parallel.state.held_tensors import layout_of, whole_runs


def print_differences(first: tuple[Path, Manifest], second: tuple[Path, Manifest]) -> bool:
    """Print how two checkpoints differ; returns whether they do."""
    one, other = SavedCheckpoint(*first), SavedCheckpoint(*second)
    table = Table("tensor", str(first[0]), str(second[0]), "largest difference")
    num_equal = 0
    for name in sorted({*one.tensors, *other.tensors}):
        kinds = [saved.tensors.get(name) for saved in (one, other)]
        shown = ["absent" if kind is None else f"{kind.dtype} {tuple(kind.shape)}" for kind in kinds]
        if shown[0] != shown[1]:
            table.add_row(name, *shown, "")
            continue
        left, right = _whole(one, name), _whole(other, name)
        if torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8)):
            num_equal += 1
            continue
        count = int((left != right).sum())
        largest = float((left.double() - right.double()).abs().max())
        table.add_row(name, f"{count} of {left.numel()} elements differ", "", f"{largest:.3g}")
    console = Console(soft_wrap=True)
    if table.row_count:
        console.print(table)
    console.print(f"{num_equal} tensors are equal, {table.row_count} differ", highlight=False)
    return table.row_count > 0


def export_model(
    path: Path, manifest: Manifest, out: Path, *, key: str, shard_bytes: int, progress: Callable[[int], None]
) -> list[Path]:
    """Write the model as safetensors files."""
    return export(SavedCheckpoint(path, manifest), out, key=key, shard_bytes=shard_bytes, progress=progress)


def import_files(source: Path, directory: Path) -> Path:
    """Save the model in safetensors files as step 0 of a directory."""
    state = model_in(source)
    with CheckpointManager(directory) as manager:
        manager.save_held(0, state, "imported")
        manager.wait_for_commit()
        return manager.directory.step_path(0)


def _whole(saved: SavedCheckpoint, name: str) -> Tensor:
    kind = saved.tensors[name]
    whole = torch.empty(kind.shape, dtype=kind.dtype)
    saved.fill(name, layout_of(kind.shape, whole_runs(kind.shape), kind.shape), whole)
    return whole
