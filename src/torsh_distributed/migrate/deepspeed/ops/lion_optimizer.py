"""`FusedLion` and `DeepSpeedCPULion`: steps by the sign of the momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override


class FusedLion(Optimizer):
    """Lion: one moment for each parameter; parameters may be sharded."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                mean = state["exp_avg"]
                direction = (mean * beta1 + param.grad * (1 - beta1)).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                mean.mul_(beta2).add_(param.grad, alpha=1 - beta2)
        return loss


class DeepSpeedCPULion(FusedLion):
    """The same update; the name scripts use with offload."""
