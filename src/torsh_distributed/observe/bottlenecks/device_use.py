"""What the devices of a run say about themselves: how full their memory was, and how often a kernel ran. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torsh_distributed.observe.trace.event_files import RecordedRun

_SHORT = 0.9
_FREE = 0.5
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """The fullest memory of a run."""

    rank: int
    device: str
    peak_bytes: int
    limit_bytes: int

    @property
    def share(self) -> float:
        """Of its limit."""
        return self.peak_bytes / self.limit_bytes

    @property
    def evidence(self) -> str:
        """In words."""
        held, whole = self.peak_bytes / _GIB, self.limit_bytes / _GIB
        return f"{self.device} of rank {self.rank} held up to {held:.1f} of {whole:.1f} GiB ({self.share:.0%})"


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """Of all ranks; None and nothing where it was not measured."""

    fullest: MemoryPeak | None = None
    gpu_ratios: Sequence[float] = ()
    """Readings of the share of time in which a GPU ran a kernel."""

    @property
    def is_short_of_memory(self) -> bool:
        """Whether a device was nearly full."""
        return self.fullest is not None and self.fullest.share >= _SHORT

    @property
    def has_free_memory(self) -> bool:
        """Whether every device was less than half full."""
        return self.fullest is not None and self.fullest.share < _FREE

    @property
    def gpu_busy_share(self) -> float | None:
        """Of the time, over all readings."""
        return statistics.fmean(self.gpu_ratios) if self.gpu_ratios else None


def recorded_use(run: RecordedRun) -> DeviceUse:
    """From the events of a run. The host counts only where no GPU is used: it holds the files that were read, too."""
    peaks = [
        MemoryPeak(
            rank=rank,
            device=record["device"],
            peak_bytes=record["peak_bytes"],
            limit_bytes=record["limit_bytes"],
        )
        for rank, record in run.of("memory")
        if record["limit_bytes"]
    ]
    on_gpus = [one for one in peaks if one.device != "host"]
    return DeviceUse(
        fullest=max(on_gpus or peaks, key=lambda one: one.share, default=None),
        gpu_ratios=[
            record["utilization"]
            for _, record in run.of("hardware")
            if record["utilization"] is not None and math.isfinite(record["utilization"])
        ],
    )
