"""FairScale's ShardedGradScaler: loss scaling where each rank holds the gradients of its own parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.collectives.reductions import all_reduce


class HalfGradScaler(GradScaler):
    """`fairscale.optim.GradScaler`: torch's, for gradients in float16 too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cuda" if torch.cuda.is_available() else "cpu", *args, **kwargs)

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


class ShardedGradScaler(GradScaler):
    """torch's scaler, with one decision for all ranks: a gradient that overflows on one rank skips the step on all.

    Works on the CPU too, where FairScale's turns itself off.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            "cuda" if torch.cuda.is_available() else "cpu",
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._group = process_group

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Every rank calls this, also one that holds no gradient; gradients may be float16, as in FairScale."""
        found: dict[Any, Tensor] = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        group = resolve_group(self._group)
        worst = torch.zeros((), device=inv_scale.device)
        for one in found.values():
            worst = torch.maximum(worst, one.to(inv_scale.device).reshape(()))
        all_reduce(worst, op="max", group=group)
        if not found:
            found[inv_scale.device] = found_inf
        for one in found.values():
            one.fill_(worst.to(one.device))
        return found
