"""When and how training state is saved: the `checkpoint` section of a plan."""

from __future__ import annotations

from pydantic import Field

from torsh_distributed.plan.section import Section


class CheckpointConfig(Section):
    """Checkpoints written during training."""

    enabled: bool = False
    """Write checkpoints during training."""

    dir: str = Field(default="./checkpoints", min_length=1)
    """Directory of the checkpoints; all ranks must see it."""

    every_steps: int = Field(default=1000, ge=1)
    """Steps between two checkpoints."""

    every_s: float | None = Field(default=None, gt=0)
    """Seconds after which a checkpoint is written even if fewer steps have passed. Left out: only steps count."""

    keep: int = Field(default=5, ge=1)
    """Number of checkpoints to keep. The best and the last complete one are never deleted."""

    save_best: bool = True
    """Keep the checkpoint with the lowest loss in addition to the latest ones."""

    async_save: bool = True
    """Write in the background: a step waits only for the copy into memory."""

    compression_level: int = Field(default=3, ge=0, le=22)
    """zstd level; 0 writes uncompressed bytes."""

    verify_after_save: bool = True
    """Read a checkpoint back and compare checksums before an older one is deleted."""
