"""What outlives a failure: the sections `recovery`, `elastic`, `retry` and `checkpoint` of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.problems import Problem
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


class RetryConfig(Section):
    """Backoff between attempts, with jitter and a total deadline; and a break after many failures.

    For what one rank does alone: questions to the store, remote checkpoints, checkpoints after a full disk. A
    collective is never repeated by one rank.
    """

    max_retries: int = Field(default=3, ge=0)
    """Attempts after the first one; 0 means a single attempt."""

    initial_delay_s: float = Field(default=0.1, ge=0)
    """Seconds to wait before the first retry."""

    multiplier: float = Field(default=2.0, ge=1)
    """Factor from one wait to the next, if `exponential` is on."""

    max_delay_s: float = Field(default=10.0, ge=0)
    """Longest single wait."""

    total_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds for all attempts and waits together; no attempt starts after that."""

    jitter: float = Field(default=0.1, ge=0, le=1)
    """Random share added to or subtracted from each wait, so ranks do not retry in lockstep."""

    exponential: bool = True
    """Off keeps the wait at `initial_delay_s`."""

    failure_threshold: int = Field(default=5, ge=1)
    """Failures of remote storage within `failure_window_s` after which nothing is tried for `break_s`: files that are
    still to be transferred then fail at once instead of waiting each for its own timeout."""

    failure_window_s: float = Field(default=60.0, gt=0)
    """Seconds that a failure counts."""

    break_s: float = Field(default=30.0, gt=0)
    """Seconds without attempts; then one is made to see whether the service is back."""

    success_threshold: int = Field(default=3, ge=1)
    """Successes in a row after a break until failures are counted from 0 again; one failure before starts the next."""


class ElasticConfig(Section):
    """Survive lost ranks and admit new ones."""

    enabled: bool = False
    """Go on when a rank is lost, and let new ones join. `torsh run --elastic` turns it on."""

    mode: Literal["in_place", "restart"] = "in_place"
    """Survivors keep their process and regroup, where the plan is plain data parallelism; or all processes restart."""

    on_loss: Literal["replace", "shrink", "wait", "restart"] = "replace"
    """After a loss: go on and replace the rank, go on smaller, wait for the replacement, or restart all."""

    min_workers: int = Field(default=1, ge=1)
    """Fewest ranks to train with; below that training waits for replacements."""

    max_workers: int = Field(default=64, ge=1)
    """Most ranks to train with; more are not admitted."""

    heartbeat_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds of silence after which a rank that runs counts as lost; one that is stopped does after 0.4 s."""

    scaling_timeout_s: float = Field(default=300.0, gt=0)
    """Timeout of a membership change, from detection to the new groups, and of the wait for replacements."""

    scaling: Literal["reactive", "conservative", "aggressive"] = "reactive"
    """When the number of ranks changes: on failures and requests alone; or also by load, the share of time spent in
    steps: slowly (above 0.9, below 0.2) or at once (above 0.8, below 0.3)."""

    scaling_interval_s: float = Field(default=30.0, gt=0)
    """Seconds between two looks at the load."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.min_workers > self.max_workers:
            yield Problem(
                "min_workers",
                f"elastic.min_workers {self.min_workers} is above elastic.max_workers {self.max_workers}",
                "lower the first or raise the second",
            )
        if self.scaling != "reactive" and self.mode == "restart":
            yield Problem(
                "scaling",
                f"elastic.scaling = {self.scaling} changes the ranks while training goes on; elastic.mode is restart",
                'set elastic.mode = "in_place", or leave scaling out',
            )


class RecoveryConfig(Section):
    """Act on memory that runs out, a loss that diverges, a disk that is full. Each is resolved by a completed step."""

    out_of_memory: Literal["raise", "smaller_microbatch"] = "raise"
    """When a pass does not fit: raise, or repeat it in halves and keep the batch. A step then has two passes or more,
    the first of which shows that the memory suffices before gradients are sent."""

    divergence: Literal["raise", "roll_back"] = "raise"
    """When the loss or the gradient is not finite, or above a limit below: raise, or go back to an earlier state."""

    max_loss: float | None = Field(default=None, gt=0)
    """A loss above this counts as diverged. Left out: only one that is not finite."""

    max_gradient_norm: float | None = Field(default=None, gt=0)
    """A norm of the gradient, before clipping, above this counts as diverged. Left out: only one that is not finite."""

    roll_back_steps: int = Field(default=20, ge=1)
    """Steps between copies of the state, and how far a roll back goes at least, if a copy is that old."""

    roll_back_from: Literal["memory", "checkpoint"] = "memory"
    """Where earlier states are: two copies in the memory of each rank, or the newest checkpoint."""

    max_roll_backs: int = Field(default=3, ge=0)
    """Roll backs in a run; the next divergence is raised."""

    skip_batches: bool = True
    """Pass over the batches that were rolled back; off trains on them again, which ends the same unless the cause was
    temporary."""

    storage: Literal["raise", "go_on"] = "raise"
    """When a periodic checkpoint cannot be written: raise, or go on without, say so, and try again as [retry] says."""

    @property
    def acts_on_steps(self) -> bool:
        """Whether steps are more than forward, backward and update."""
        return self.out_of_memory != "raise" or self.divergence != "raise"
