"""Optimizer updates that do nothing if the gradient is not finite, decided on the device where possible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer


def decides_on_device(optimizer: Optimizer, norm: Tensor) -> bool:
    """Whether `only_if_finite` works: torch's fused optimizers read the flag that GradScaler sets in their kernels.

    Without it the host must read the norm before it queues the update, and the GPU is idle meanwhile.
    """
    takes_flag = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return norm.is_cuda and takes_flag and all(group.get("fused") for group in optimizer.param_groups)


@contextmanager
def only_if_finite(optimizer: Optimizer, norm: Tensor) -> Iterator[None]:
    """Inside, an optimizer step changes neither parameters nor state unless `norm` is finite."""
    flagged: dict[str, Tensor | None] = {"grad_scale": None, "found_inf": torch.isfinite(norm).logical_not().float()}
    for name, value in flagged.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in flagged:
            delattr(optimizer, name)
