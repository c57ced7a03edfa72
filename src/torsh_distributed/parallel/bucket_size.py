"""Bucket sizes from what the link was measured to do."""

from __future__ import annotations

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.comm.algorithms.base import Link
from torsh_distributed.comm.algorithms.links import measure_links
from torsh_distributed.plan import BucketConfig

_LATENCY_SHARE = 0.1
_LEAST_MB, _MOST_MB = 1.0, 50.0


def auto_bucket(config: BucketConfig | None = None, *, group: dist.ProcessGroup) -> BucketConfig:
    """`config` with both bucket sizes chosen by the measured link; every rank of the group calls this.

    All ranks choose alike, from the slowest link that any of them saw. In a group of one nothing travels, and the sizes
    stay as they are.
    """
    chosen = config or BucketConfig()
    if group.size() == 1:
        return chosen
    figures = measure_links(group)
    link = figures.far or figures.flat
    largest_mb = bucket_size_mb(link, num_ranks=group.size())
    sized = chosen.replace(max_bucket_size_mb=largest_mb, min_bucket_size_mb=max(0.5, largest_mb / 10), auto_size=False)
    events.emit(
        events.DecisionEvent(
            subject="bucket size",
            choice=f"{largest_mb:.1f} MB, first {sized.min_bucket_size_mb:.1f} MB",
            reason=f"latency {link.latency_s * 1e6:.0f} us, {link.byte_s * 1e9:.2f} ns a byte, {group.size()} ranks:"
            f" latency is {_LATENCY_SHARE:.0%} of a bucket's time",
        )
    )
    return sized


def bucket_size_mb(link: Link, *, num_ranks: int) -> float:
    """The smallest bucket that a ring spends at most a tenth of its time on latency for, within 1 to 50 MB.

    A ring takes 2 (P - 1) (latency + bytes / P * byte_s). Smaller buckets overlap sooner, larger ones pay latency less
    often.
    """
    if link.byte_s == 0:
        return _MOST_MB
    num_bytes = num_ranks * link.latency_s / link.byte_s / _LATENCY_SHARE
    return min(_MOST_MB, max(_LEAST_MB, num_bytes / 2**20))
