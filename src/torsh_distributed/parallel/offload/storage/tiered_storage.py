"""Stores arrays, each in a form and in a tier: host memory first, disk when that is full."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torsh_distributed.parallel.offload.storage.forms import Form, Role
from torsh_distributed.parallel.offload.storage.tiers import Allocation, DiskTier, HostTier, StorageTier


@dataclass(eq=False)
class StoredArray:
    """One array: `numel` fp32 values, encoded in a form."""

    name: str
    numel: int
    role: Role
    form: Form
    allocation: Allocation
    is_optimizer_state: bool = False
    is_fixed: bool = False
    """Whether others have views of its bytes, so it may not move to another place."""
    last_use: int = 0

    @property
    def payload(self) -> Tensor:
        """The encoded bytes."""
        return self.allocation.tensor

    @property
    def is_on_disk(self) -> bool:
        """Whether the disk tier holds it."""
        return isinstance(self.allocation.tier, DiskTier)

    def view(self) -> Tensor | None:
        """The values in place, in the form's dtype; None if they must be decoded."""
        if self.form.dtype is None or (self.role == "variance" and not self.form.is_exact):
            return None
        return self.payload.view(self.form.dtype)


@dataclass
class TrafficCounters:
    """Bytes moved so far, by direction."""

    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0


@dataclass
class TieredStorage:
    """Arrays in two tiers. One thread at a time per array; different arrays are independent."""

    host: HostTier
    disk: DiskTier | None
    traffic: TrafficCounters = field(default_factory=TrafficCounters)
    arrays: list[StoredArray] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    """For random rounding; the same seed on all ranks keeps replicas equal."""
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
        fixed_in: StorageTier | None = None,
    ) -> StoredArray:
        """A new array of zeros, in host memory if it fits, else on disk, else MemoryAllocationFailed.

        `is_copied`: a GPU copies its bytes without decoding. `fixed_in`: the tier that it is in and stays in.
        """
        size = form.num_bytes(numel)
        payload = None
        if size is None:
            payload = form.encode(torch.zeros(numel), role=role, generator=self.generator)
            size = payload.numel()
        what, tier = f"{name} ({numel} values as {form.name})", fixed_in or self._tier_for(size)
        allocation = tier.allocate(size, what, is_copied=is_copied)
        if payload is not None:
            allocation.tensor.copy_(payload)
        is_fixed = fixed_in is not None
        array = StoredArray(name, numel, role, form, allocation, is_optimizer_state, is_fixed, next(self._clock))
        self.arrays.append(array)
        return array

    def load(self, array: StoredArray) -> Tensor:
        """The values, 1-D fp32: in place if the form is fp32, otherwise decoded into new memory."""
        array.last_use = next(self._clock)
        if array.is_on_disk:
            self.traffic.disk_read_bytes += array.payload.numel()
        values = array.view()
        if values is not None and values.dtype == torch.float32:
            return values
        return array.form.decode(array.payload, array.numel, role=array.role)

    def save(self, array: StoredArray, values: Tensor) -> None:
        """Store `values` (1-D fp32, on the host); those that `load` returned in place need no encoding."""
        array.last_use = next(self._clock)
        if values.untyped_storage().data_ptr() != array.payload.untyped_storage().data_ptr():
            self._replace(array, array.form.encode(values, role=array.role, generator=self.generator))
        if array.is_on_disk:
            self.traffic.disk_written_bytes += array.payload.numel()
            array.allocation.drop_pages()

    def move_to_disk(self, array: StoredArray) -> None:
        """Move an array from host memory to disk."""
        assert self.disk is not None, "called only with a disk"
        allocation = self.disk.allocate(array.payload.numel(), f"{array.name} from host memory")
        allocation.tensor.copy_(array.payload)
        self.traffic.disk_written_bytes += allocation.tensor.numel()
        allocation.drop_pages()
        self.host.free(array.allocation)
        array.allocation = allocation

    def change_form(self, array: StoredArray, form: Form) -> None:
        """Encode an array in another, smaller form."""
        values = self.load(array).clone()
        array.form = form
        self._replace(array, form.encode(values, role=array.role, generator=self.generator))

    @property
    def stored_bytes(self) -> int:
        """Size of the encoded arrays."""
        return sum(array.payload.numel() for array in self.arrays)

    @property
    def raw_bytes(self) -> int:
        """Size of the same arrays in fp32."""
        return sum(4 * array.numel for array in self.arrays)

    def close(self) -> None:
        """Free all arrays and the file."""
        for array in self.arrays:
            array.allocation.tier.free(array.allocation)
        self.arrays.clear()
        if self.disk is not None:
            self.disk.close()

    def _replace(self, array: StoredArray, payload: Tensor) -> None:
        if payload.numel() != array.payload.numel():
            array.allocation.tier.free(array.allocation)
            size = payload.numel()
            array.allocation = self._tier_for(size).allocate(size, f"{array.name} as {array.form.name}")
        array.payload.copy_(payload)

    def _tier_for(self, num_bytes: int) -> StorageTier:
        return self.host if self.disk is None or num_bytes <= self.host.budget.free_bytes else self.disk


_PLAIN_NUMEL, _DECODED_NUMEL = 1 << 24, 1 << 22

Slot = StoredArray | Tensor
"""Values of a piece: stored, or a tensor outside storage (kept on the device, or updated in place)."""


@dataclass(eq=False)
class StatePiece:
    """Elements `start` to `stop` of a flat tensor, and where their values and optimizer state are."""

    start: int
    stop: int
    is_trained: bool = True
    param: Slot | None = None
    """What forward and backward read; None if the values never leave the device."""
    master: Slot | None = None
    """What the update changes; the same as `param` if that is precise enough. None: frozen."""
    exp_avg: Slot | None = None
    exp_avg_sq: Slot | None = None
    grad: Slot | None = None
    """Where the gradient is kept until the update; None if it stays on the device."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def slots(self) -> tuple[Slot, Slot, Slot]:
        """Master values, first and second moment of a trained piece."""
        assert self.master is not None
        assert self.exp_avg is not None
        assert self.exp_avg_sq is not None
        return self.master, self.exp_avg, self.exp_avg_sq

    @property
    def is_direct(self) -> bool:
        """Whether the update works in place, with nothing to decode."""
        return all(isinstance(slot, Tensor) or is_fp32_in_place(slot) for slot in self.slots)


def is_fp32_in_place(slot: Slot) -> bool:
    """Whether `read` returns the values themselves, not a copy."""
    if isinstance(slot, Tensor):
        return True
    view = slot.view()
    return view is not None and view.dtype == torch.float32


def read(storage: TieredStorage, slot: Slot) -> Tensor:
    """The values as fp32, in place if possible."""
    return slot if isinstance(slot, Tensor) else storage.load(slot)


def write(storage: TieredStorage, slot: Slot, values: Tensor) -> None:
    """Save `values`, as `read` returned them and the caller changed them."""
    if isinstance(slot, StoredArray):
        storage.save(slot, values)
    elif slot.data_ptr() != values.data_ptr():
        slot.copy_(values)


def overlaps(pieces: Iterable[StatePiece], start: int, stop: int) -> list[tuple[StatePiece, int, int]]:
    """The pieces that hold some of elements `start` to `stop`, and which ones: (piece, first, end)."""
    bounds = ((piece, max(piece.start, start), min(piece.stop, stop)) for piece in pieces)
    return [(piece, low, high) for piece, low, high in bounds if low < high]


def max_numel(form: Form) -> int:
    """Elements of the largest piece: fewer pieces cost less Python, smaller ones less memory to decode in."""
    return _PLAIN_NUMEL if form.dtype == torch.float32 else _DECODED_NUMEL


def cut(start: int, stop: int, max_numel: int) -> list[tuple[int, int]]:
    """Split the range `start` to `stop` into ranges of at most `max_numel`."""
    return list(itertools.pairwise([*range(start, stop, max_numel), stop])) if stop > start else []
