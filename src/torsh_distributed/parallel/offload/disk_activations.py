"""Keeps the activations that forward saves for backward in a mapped file."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torsh_distributed.parallel.activation import is_param
from torsh_distributed.parallel.offload.offload_stats import TierUse
from torsh_distributed.parallel.offload.storage.tiers import Allocation, DiskTier
from torsh_distributed.plan.sections.training import ActivationConfig

_MIN_BYTES = 1 << 16
"""Smaller ones stay: a place in the file is a multiple of a page."""


class DiskActivations:
    """The forward of a model whose saved activations are in a file until backward reads them.

    Parameters stay where they are, and so do small tensors. What was saved last is read first: while one is
    copied back, the kernel reads the one that was saved before it.
    """

    def __init__(self, model: nn.Module, config: ActivationConfig) -> None:
        assert config.disk_dir is not None, "called only with one"
        self._forward: Callable[..., Any] = model.forward
        self._tier = DiskTier(config.disk_dir, int(config.disk_budget_gb * 2**30), section="activation")
        # Backward on a GPU frees on autograd's own threads.
        self._lock = threading.Lock()
        self._saved: weakref.WeakValueDictionary[int, _SavedActivation] = weakref.WeakValueDictionary()
        self._number = 0

    @property
    def use(self) -> TierUse:
        """Bytes in the file: now, at most so far, and allowed."""
        return TierUse.of(self._tier.budget)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        with self._on_disk() if torch.is_grad_enabled() else nullcontext():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor | _SavedActivation:
        if tensor.nbytes < _MIN_BYTES or is_param(tensor) or tensor.layout != torch.strided:
            return tensor
        with self._lock:
            allocation = self._tier.allocate(tensor.nbytes, "an activation")
            self._number += 1
            saved = self._saved[self._number] = _SavedActivation(self._number, allocation, tensor)
        weakref.finalize(saved, self._free, allocation).atexit = False
        saved.values().copy_(tensor.detach())
        allocation.drop_pages()
        return saved

    def _unpack(self, saved: Tensor | _SavedActivation) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        before = self._saved.get(saved.number - 1)
        if before is not None:
            before.allocation.prefetch()
        values = torch.empty(saved.shape, dtype=saved.dtype, device=saved.device)
        values.copy_(saved.values())
        saved.allocation.drop_pages()
        return values

    def _free(self, allocation: Allocation) -> None:
        with self._lock:
            self._tier.free(allocation)


class _SavedActivation:
    """What autograd keeps in place of a tensor; its place in the file is free when this is no longer referenced."""

    def __init__(self, number: int, allocation: Allocation, tensor: Tensor) -> None:
        self.number = number
        self.allocation = allocation
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def values(self) -> Tensor:
        """The values in the file."""
        return self.allocation.tensor.view(self.dtype).view(self.shape)


def activations_to_disk(model: nn.Module, config: ActivationConfig) -> DiskActivations:
    """Let the model save its activations in a file in `config.disk_dir`, in place."""
    made = DiskActivations(model, config)
    model.forward = made
    return made
