"""Pieces: ranges of a flat tensor that are stored, updated and copied as one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torsh_distributed.parallel.offload.storage.forms import Form
from torsh_distributed.parallel.offload.storage.tiered_storage import StoredArray, TieredStorage

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
