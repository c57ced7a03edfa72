"""Pieces: runs of a flat tensor that are stored, updated and copied as one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from torsh_distributed.parallel.offload.storage.forms import Form
from torsh_distributed.parallel.offload.storage.tiered_storage import Entry, Store

_PLAIN_NUMEL, _DECODED_NUMEL = 1 << 24, 1 << 22

Slot = Entry | Tensor
"""Values of a piece: held by the store, or a tensor that is simply there (kept on the device, or updated in place)."""


@dataclass(eq=False)
class Piece:
    """Elements `start` to `stop` of a flat tensor, and where their values and optimizer state lie."""

    start: int
    stop: int
    is_trained: bool = True
    param: Slot | None = None
    """What forward and backward read; None where the values never leave the device."""
    master: Slot | None = None
    """What the update works on; the same as `param` where that is precise enough. None: frozen."""
    exp_avg: Slot | None = None
    exp_avg_sq: Slot | None = None
    grad: Slot | None = None
    """Where the gradient waits for the update; None where it stays on the device."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def slots(self) -> tuple[Slot, Slot, Slot]:
        """Master, first and second moment of a piece that is trained."""
        assert self.master is not None
        assert self.exp_avg is not None
        assert self.exp_avg_sq is not None
        return self.master, self.exp_avg, self.exp_avg_sq

    @property
    def is_direct(self) -> bool:
        """Whether the update can work in place: nothing to decode."""
        return all(isinstance(slot, Tensor) or is_fp32_in_place(slot) for slot in self.slots)


def is_fp32_in_place(slot: Slot) -> bool:
    """Whether `read` gives the values themselves, not a copy."""
    if isinstance(slot, Tensor):
        return True
    view = slot.view()
    return view is not None and view.dtype == torch.float32


def read(store: Store, slot: Slot) -> Tensor:
    """The values as fp32, in place where that is possible."""
    return slot if isinstance(slot, Tensor) else store.load(slot)


def write(store: Store, slot: Slot, values: Tensor) -> None:
    """Hold `values`, which `read` gave, changed."""
    if isinstance(slot, Entry):
        store.save(slot, values)
    elif slot.data_ptr() != values.data_ptr():
        slot.copy_(values)


def max_numel(form: Form) -> int:
    """Elements of the largest piece: few pieces cost little Python, small ones little memory where they are decoded."""
    return _PLAIN_NUMEL if form.dtype == torch.float32 else _DECODED_NUMEL


def cut(start: int, stop: int, max_numel: int) -> list[tuple[int, int]]:
    """The run from `start` to `stop` in runs of at most `max_numel`."""
    return list(itertools.pairwise([*range(start, stop, max_numel), stop])) if stop > start else []
