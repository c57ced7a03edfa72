"""When and how training state is kept: the `checkpoint` section of a plan."""

from __future__ import annotations

from pydantic import Field

from torsh_distributed.plan.section import Section


class CheckpointConfig(Section):
    """Checkpoints written while training runs."""

    enabled: bool = False
    """Write checkpoints during training. `engine.save` and `engine.load` work either way."""

    dir: str = Field(default="./checkpoints", min_length=1)
    """Directory that all ranks see."""

    every_steps: int = Field(default=1000, ge=1)
    """Steps between two checkpoints."""

    every_s: float | None = Field(default=None, gt=0)
    """Write one after this long even if fewer steps have passed. Left out: steps alone decide."""

    keep: int = Field(default=5, ge=1)
    """Checkpoints kept. The best and the last whole one are never deleted."""

    save_best: bool = True
    """Keep the checkpoint of the lowest loss beside the latest ones."""

    async_save: bool = True
    """Write beside training: a step waits only for the copy into memory."""

    compression_level: int = Field(default=3, ge=0, le=22)
    """zstd level; 0 writes plain bytes."""

    verify_after_save: bool = True
    """Read back and compare checksums before an older checkpoint is deleted."""
