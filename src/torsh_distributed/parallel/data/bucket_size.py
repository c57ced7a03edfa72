"""Chooses bucket sizes from measurements of the link."""

from __future__ import annotations

import torch
import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.comm.measurement.network import NetworkProfiler
from torsh_distributed.comm.shared_memory.buffers import shares_memory
from torsh_distributed.plan import DdpConfig

_LATENCY_SHARE = 0.1
_LEAST_MB, _MOST_MB = 1.0, 50.0


def auto_bucket(config: DdpConfig | None = None, *, group: dist.ProcessGroup, device: torch.device) -> DdpConfig:
    """`config` with both bucket sizes chosen by the measured link; every rank of the group calls this.

    `device` is where gradients are: a group may have a backend for each kind of device.

    All ranks choose the same, by the slowest of them. Sizes do not change in a group of one, where nothing is sent, nor
    where ranks share memory: there is no link to keep busy, and every bucket costs a synchronization.
    """
    chosen = config or DdpConfig()
    if group.size() == 1 or shares_memory(group):
        return chosen
    network = NetworkProfiler(group, device=device).measure()
    largest_mb = bucket_size_mb(latency_s=network.latency_s, byte_s=network.byte_s)
    sized = chosen.replace(max_bucket_size_mb=largest_mb, min_bucket_size_mb=max(0.5, largest_mb / 10), auto_size=False)
    events.emit(
        events.DecisionEvent(
            subject="bucket size",
            choice=f"{largest_mb:.1f} MB, first {sized.min_bucket_size_mb:.1f} MB",
            reason=f"an all-reduce takes {network.latency_s * 1e6:.0f} us and {network.byte_s * 1e9:.2f} ns a byte:"
            f" the former is {_LATENCY_SHARE:.0%} of a bucket's time",
        )
    )
    return sized


def bucket_size_mb(*, latency_s: float, byte_s: float) -> float:
    """The smallest bucket whose bytes take ten times as long as its latency, within 1 to 50 MB.

    Smaller buckets overlap sooner, larger ones pay latency less often.
    """
    return min(_MOST_MB, max(_LEAST_MB, latency_s / byte_s / _LATENCY_SHARE / 2**20))
