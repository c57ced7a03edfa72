"""Measured statistics of offload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

import torch.distributed as dist

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.parallel.offload.layer_times import LayerTime
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
    layers: tuple[LayerTime, ...] = ()
    """Where the time went, in the order of the model; empty where offload has no hooks in it."""
    num_ranks: int = 1
    """Of how many ranks these numbers are the totals."""

    @classmethod
    def measure(
        cls,
        storage: TieredStorage,
        device: MemoryBudget,
        *,
        update_s: float,
        stall_s: float = 0.0,
        counters: PagerCounters | None = None,
        prefetch_distance: int = 0,
        layers: tuple[LayerTime, ...] = (),
    ) -> OffloadStats:
        """The counters as they are now; without a pager nothing is fetched ahead, so hits and misses are 0."""
        pager, traffic, disk = counters or PagerCounters(), storage.traffic, storage.disk
        return cls(
            num_hits=pager.num_hits,
            num_misses=pager.num_misses,
            num_evictions=pager.num_evictions,
            stall_s=stall_s,
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
            layers=layers,
        )

    def over_ranks(self, group: dist.ProcessGroup | None = None) -> OffloadStats:
        """The totals of all ranks, by sum (the prefetch distance: the largest); every rank of `group` calls this."""
        ranks = [_read(one) for one in all_gather_object(asdict(self), group=group)]
        return ranks[0].plus(ranks[1:])

    def plus(self, others: Sequence[OffloadStats]) -> OffloadStats:
        """The sums of these and other ranks' numbers; layers are added up by name."""
        every = [self, *others]
        sums = {
            name: sum(getattr(one, name) for one in every)
            for name, value in asdict(self).items()
            if isinstance(value, int | float)
        }
        disks = [one.disk for one in every if one.disk is not None]
        layers: dict[str, list[LayerTime]] = {}
        for layer in (layer for one in every for layer in one.layers):
            layers.setdefault(layer.name, []).append(layer)
        return replace(
            self,
            **{**sums, "prefetch_distance": max(one.prefetch_distance for one in every)},
            device=_sum([one.device for one in every]),
            host=_sum([one.host for one in every]),
            disk=_sum(disks) if disks else None,
            layers=tuple(_sum(found, name=name) for name, found in layers.items()),
        )

    @property
    def slowest_layers(self) -> list[LayerTime]:
        """The layers by the time they take, the longest first."""
        return sorted(self.layers, key=lambda one: -(one.wait_s + one.forward_s + one.backward_s))

    @property
    def hit_rate(self) -> float | None:
        """Share of hits; None before the first use."""
        uses = self.num_hits + self.num_misses
        return self.num_hits / uses if uses else None

    @property
    def compression_ratio(self) -> float | None:
        """Stored bytes divided by raw bytes. None while nothing is stored."""
        return self.stored_bytes / self.raw_bytes if self.raw_bytes else None


Summed = TypeVar("Summed", TierUse, LayerTime)


def _sum(found: Sequence[Summed], **same: Any) -> Summed:
    kind = type(found[0])
    names = [field.name for field in fields(kind) if field.name not in same]
    return kind(**{name: sum(getattr(one, name) for one in found) for name in names}, **same)


def _read(values: dict[str, Any]) -> OffloadStats:
    """What another rank sent, as a dictionary."""
    tiers = {name: values[name] and TierUse(**values[name]) for name in ("device", "host", "disk")}
    return OffloadStats(**{**values, **tiers, "layers": tuple(LayerTime(**one) for one in values["layers"])})
