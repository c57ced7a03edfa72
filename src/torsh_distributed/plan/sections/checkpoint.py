"""When and how training state is saved: the `checkpoint` section of a plan."""

from __future__ import annotations

from pydantic import Field

from torsh_distributed.plan.section import Section


class CheckpointConfig(Section):
    """Checkpoints written during training."""

    enabled: bool = False
    """Write checkpoints during training."""

    dir: str = Field(default="./checkpoints", min_length=1)
    """Directory of the checkpoints; all ranks must see it, unless `per_node` is on."""

    every_steps: int = Field(default=1000, ge=1)
    """Steps between two checkpoints."""

    every_s: float | None = Field(default=None, gt=0)
    """Seconds after which a checkpoint is written even if fewer steps have passed. Left out: only steps count."""

    keep: int = Field(default=5, ge=1)
    """Number of latest checkpoints to keep. The last complete one is never deleted."""

    keep_best: int = Field(default=1, ge=0)
    """Number of checkpoints with the lowest loss to keep in addition to the latest ones."""

    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints whose step is a multiple of this are never deleted. Left out: none for this reason."""

    async_save: bool = True
    """Write in the background: a step waits only for the copy into memory."""

    compression_level: int = Field(default=0, ge=0, le=22)
    """zstd level; 0 writes uncompressed bytes, which is faster on any local disk."""

    verify_after_save: bool = True
    """Read a checkpoint back in the background and compare checksums before an older one is deleted."""

    remote: str | None = None
    """URL of a second home, such as s3://bucket/run, or any other place that fsspec reaches: what is saved is uploaded
    there in the background, and fetched from there if `dir` lacks it. Left out: `dir` alone."""

    per_node: bool = False
    """`dir` is on each node's own disk: a node writes the files of its own ranks, at the speed of that disk. A load
    copies to every node what it lacks, from the other nodes or from `remote`; without `remote`, losing a node loses its
    part."""

    replica_every_steps: int | None = Field(default=None, ge=1)
    """Steps between two copies of each rank's state in the memory of another rank, on another node if there are
    several, from which lost ranks are restored without a disk. Costs four times a rank's state in host memory. Left
    out: no copies."""
