"""Updates that do nothing where the gradient is not finite, decided on the device where the optimizer can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer


def decides_on_device(optimizer: Optimizer, norm: Tensor) -> bool:
    """Whether `only_if_finite` works: torch's fused optimizers read a flag in their kernels, the one GradScaler sets.

    Without it the host must read the norm before it queues the update, while the GPU has nothing to do.
    """
    takes_flag = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return norm.is_cuda and takes_flag and all(group.get("fused") for group in optimizer.param_groups)


@contextmanager
def only_if_finite(optimizer: Optimizer, norm: Tensor) -> Iterator[None]:
    """Inside, a step of the optimizer leaves parameters and its state as they are unless `norm` is finite."""
    flagged: dict[str, Tensor | None] = {"grad_scale": None, "found_inf": torch.isfinite(norm).logical_not().float()}
    for name, value in flagged.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in flagged:
            delattr(optimizer, name)
