"""What offload did: one record, all of it measured."""

from __future__ import annotations

from dataclasses import dataclass

from torsh_distributed.parallel.offload.storage.tiers import Ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class TierUse:
    """Bytes of one kind of memory: now, at most so far, and allowed."""

    used_bytes: int
    peak_bytes: int
    budget_bytes: int

    @classmethod
    def of(cls, ledger: Ledger) -> TierUse:
        """As a ledger counts them."""
        return cls(used_bytes=ledger.used_bytes, peak_bytes=ledger.peak_bytes, budget_bytes=ledger.budget_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadStats:
    """Counters since the start of training, and memory as it is now."""

    num_hits: int
    """Uses of a unit that was on the device, or on its way there, before it was asked for."""
    num_misses: int
    num_evictions: int
    stall_s: float
    """Seconds that computation waited for parameters."""
    update_s: float
    """Seconds in the optimizer's update."""
    prefetch_distance: int
    """How many uses ahead units are fetched now."""
    host_to_device_bytes: int
    device_to_host_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    stored_bytes: int
    """What the store holds, in the form it is held."""
    raw_bytes: int
    """What the same values would take as fp32."""
    device: TierUse
    """Parameters, gradients and optimizer state on the device; activations are not offload's."""
    host: TierUse
    disk: TierUse | None

    @property
    def hit_rate(self) -> float | None:
        """Share of hits; None before the first use."""
        uses = self.num_hits + self.num_misses
        return self.num_hits / uses if uses else None

    @property
    def compression_ratio(self) -> float | None:
        """Stored bytes over raw ones: below 1 is smaller. None while nothing is stored."""
        return self.stored_bytes / self.raw_bytes if self.raw_bytes else None
