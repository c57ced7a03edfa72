"""Whose checkpoint a path is: DeepSpeed's directories, and the files and directories of plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torsh_distributed.errors import CheckpointError
from torsh_distributed.migrate.deepspeed.checkpoints.deepspeed_state import open_checkpoint
from torsh_distributed.migrate.foreign_state import ForeignState
from torsh_distributed.migrate.pytorch.torch_checkpoint import open_torch_checkpoint, require_optimizer
from torsh_distributed.migrate.pytorch.torch_files import INDEX


def open_any_checkpoint(
    source: Path,
    tag: str | None = None,
    *,
    weights_only: bool = False,
    model_key: str | None = None,
    inert: Sequence[str] = (),
) -> ForeignState:
    """A checkpoint of another library. `tag` is DeepSpeed's, `model_key` torch's; without weights alone, whole ones."""
    if not (source.is_file() or (source / INDEX).is_file()):
        return open_checkpoint(source, tag, with_optimizer=not weights_only, inert=inert)
    if tag is not None:
        raise CheckpointError("checkpoints of plain torch have no tags", hint="leave out --tag", source=str(source))
    saved = open_torch_checkpoint(source, model_key=model_key, inert=inert)
    if not weights_only:
        require_optimizer(saved)
    return saved
