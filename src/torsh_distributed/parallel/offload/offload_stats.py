"""Measured statistics of offload."""

from __future__ import annotations

from dataclasses import dataclass

from torsh_distributed.parallel.offload.storage.mover import Mover
from torsh_distributed.parallel.offload.storage.tiered_storage import TieredStorage
from torsh_distributed.parallel.offload.storage.tiers import MemoryBudget


@dataclass
class PagerCounters:
    """Uses of units so far, by whether they were on the device, and how many units were evicted."""

    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TierUse:
    """Bytes of one kind of memory: in use, peak, and allowed."""

    used_bytes: int
    peak_bytes: int
    budget_bytes: int

    @classmethod
    def of(cls, budget: MemoryBudget) -> TierUse:
        """The numbers of a budget, as they are now."""
        return cls(used_bytes=budget.used_bytes, peak_bytes=budget.peak_bytes, budget_bytes=budget.limit_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadStats:
    """Counters since the start of training, and memory use now."""

    num_hits: int
    """Uses of a unit that was already on the device, or on its way there."""
    num_misses: int
    num_evictions: int
    stall_s: float
    """Seconds that computation waited for parameters."""
    update_s: float
    """Seconds in the optimizer's update."""
    prefetch_distance: int
    """How many uses ahead units are fetched."""
    host_to_device_bytes: int
    device_to_host_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    stored_bytes: int
    """Size of the stored arrays in their present form."""
    raw_bytes: int
    """Size of the same values in fp32."""
    device: TierUse
    """Parameters, gradients and optimizer state on the device; activations are not counted."""
    host: TierUse
    disk: TierUse | None

    @classmethod
    def measure(
        cls,
        storage: TieredStorage,
        mover: Mover,
        device: MemoryBudget,
        *,
        update_s: float,
        counters: PagerCounters | None = None,
        prefetch_distance: int = 0,
    ) -> OffloadStats:
        """The counters as they are now; without a pager nothing is fetched ahead, so hits and misses are 0."""
        pager, traffic, disk = counters or PagerCounters(), storage.traffic, storage.disk
        return cls(
            num_hits=pager.num_hits,
            num_misses=pager.num_misses,
            num_evictions=pager.num_evictions,
            stall_s=mover.stall_s,
            update_s=update_s,
            prefetch_distance=prefetch_distance,
            host_to_device_bytes=traffic.host_to_device_bytes,
            device_to_host_bytes=traffic.device_to_host_bytes,
            disk_read_bytes=traffic.disk_read_bytes,
            disk_written_bytes=traffic.disk_written_bytes,
            stored_bytes=storage.stored_bytes,
            raw_bytes=storage.raw_bytes,
            device=TierUse.of(device),
            host=TierUse.of(storage.host.budget),
            disk=None if disk is None else TierUse.of(disk.budget),
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of hits; None before the first use."""
        uses = self.num_hits + self.num_misses
        return self.num_hits / uses if uses else None

    @property
    def compression_ratio(self) -> float | None:
        """Stored bytes divided by raw bytes. None while nothing is stored."""
        return self.stored_bytes / self.raw_bytes if self.raw_bytes else None
