"""The store: arrays held in a form, in a tier. Host memory first, the disk when that is full."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torsh_distributed.parallel.offload.storage.forms import Form, Role
from torsh_distributed.parallel.offload.storage.tiers import DiskTier, HostTier, Region, Tier


@dataclass(eq=False)
class Entry:
    """One array: `numel` values that mean fp32, held as the form says."""

    name: str
    numel: int
    role: Role
    form: Form
    region: Region
    is_optimizer_state: bool = False
    last_use: int = 0

    @property
    def payload(self) -> Tensor:
        """The bytes held."""
        return self.region.tensor

    @property
    def is_on_disk(self) -> bool:
        """Whether the disk tier holds it."""
        return isinstance(self.region.tier, DiskTier)

    def view(self) -> Tensor | None:
        """The values in place, in the form's dtype; None where they must be decoded."""
        if self.form.dtype is None or (self.role == "variance" and not self.form.is_exact):
            return None
        return self.payload.view(self.form.dtype)


@dataclass
class Traffic:
    """Bytes that moved, by direction."""

    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0


@dataclass
class Store:
    """Entries in two tiers. Not safe for several threads on one entry; different entries are independent."""

    host: HostTier
    disk: DiskTier | None
    traffic: Traffic = field(default_factory=Traffic)
    entries: list[Entry] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    """For rounding at random: seeded alike on all ranks, so that replicas stay equal."""
    _clock: itertools.count[int] = field(default_factory=itertools.count)

    def add(
        self,
        name: str,
        numel: int,
        *,
        role: Role,
        form: Form,
        is_copied: bool = False,
        is_optimizer_state: bool = False,
    ) -> Entry:
        """A new entry of zeros, in host memory if it fits, else on disk, else MemoryAllocationFailed.

        `is_copied` says that a GPU copies its bytes as they are.
        """
        size = form.num_bytes(numel)
        payload = None
        if size is None:
            payload = form.encode(torch.zeros(numel), role=role, generator=self.generator)
            size = payload.numel()
        region = self._allocate(size, f"{name} ({numel} values as {form.name})", is_copied=is_copied)
        if payload is not None:
            region.tensor.copy_(payload)
        entry = Entry(name, numel, role, form, region, is_optimizer_state, next(self._clock))
        self.entries.append(entry)
        return entry

    def load(self, entry: Entry) -> Tensor:
        """The values, 1-D fp32: in place where the form is fp32, decoded into new memory otherwise."""
        entry.last_use = next(self._clock)
        if entry.is_on_disk:
            self.traffic.disk_read_bytes += entry.payload.numel()
        values = entry.view()
        if values is not None and values.dtype == torch.float32:
            return values
        return entry.form.decode(entry.payload, entry.numel, role=entry.role)

    def save(self, entry: Entry, values: Tensor) -> None:
        """Hold `values` (1-D fp32, on the host) from now on; those that `load` gave in place need no encoding."""
        entry.last_use = next(self._clock)
        if values.untyped_storage().data_ptr() != entry.payload.untyped_storage().data_ptr():
            self._replace(entry, entry.form.encode(values, role=entry.role, generator=self.generator))
        if entry.is_on_disk:
            self.traffic.disk_written_bytes += entry.payload.numel()
            entry.region.cool()

    def demote(self, entry: Entry) -> None:
        """Move an entry from host memory to the disk."""
        assert self.disk is not None, "asked for only where there is a disk"
        region = self.disk.allocate(entry.payload.numel(), f"{entry.name} from host memory")
        region.tensor.copy_(entry.payload)
        self.traffic.disk_written_bytes += region.tensor.numel()
        region.cool()
        self.host.free(entry.region)
        entry.region = region

    def reform(self, entry: Entry, form: Form) -> None:
        """Hold an entry in another, smaller form."""
        values = self.load(entry).clone()
        entry.form = form
        self._replace(entry, form.encode(values, role=entry.role, generator=self.generator))

    @property
    def stored_bytes(self) -> int:
        """Bytes that the entries take as they are held."""
        return sum(entry.payload.numel() for entry in self.entries)

    @property
    def raw_bytes(self) -> int:
        """Bytes that the same entries would take as fp32."""
        return sum(4 * entry.numel for entry in self.entries)

    def close(self) -> None:
        """Free all entries, and the file."""
        for entry in self.entries:
            entry.region.tier.free(entry.region)
        self.entries.clear()
        if self.disk is not None:
            self.disk.close()

    def _replace(self, entry: Entry, payload: Tensor) -> None:
        if payload.numel() != entry.payload.numel():
            entry.region.tier.free(entry.region)
            entry.region = self._allocate(payload.numel(), f"{entry.name} as {entry.form.name}")
        entry.payload.copy_(payload)

    def _allocate(self, num_bytes: int, what: str, *, is_copied: bool = False) -> Region:
        tier: Tier = self.host
        if self.disk is not None and num_bytes > self.host.ledger.free_bytes:
            tier = self.disk
        return tier.allocate(num_bytes, what, is_copied=is_copied)
