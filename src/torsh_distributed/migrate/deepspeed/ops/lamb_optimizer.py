"""`FusedLamb`: Adam's step, scaled for each parameter by the ratio of its norm to the step's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.errors import FeatureNotAvailable


class FusedLamb(Optimizer):
    """LAMB with DeepSpeed's clamps of the ratio; parameters may be sharded (DTensors), norms are of the whole."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise FeatureNotAvailable("FusedLamb does not support the AMSGrad variant.", hint="leave amsgrad out")
        if max_grad_norm:
            raise FeatureNotAvailable("FusedLamb does not clip", hint="use gradient_clipping of the config")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self._eps_inside = eps_inside_sqrt

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(group, param)
        return loss

    def _update(self, group: dict[str, Any], param: Any) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(param.grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        count = float(state["step"])
        size = group["lr"]
        if group["bias_correction"]:
            size *= (1 - beta2**count) ** 0.5 / (1 - beta1**count)
        root = (square + group["eps"]).sqrt() if self._eps_inside else square.sqrt() + group["eps"]
        update = mean / root
        if group["weight_decay"]:
            update = update + group["weight_decay"] * param
        weight_norm, update_norm = float(_norm(param)), float(_norm(update))
        ratio = 1.0
        if weight_norm and update_norm:
            ratio = min(max(weight_norm / update_norm, group["min_coeff"]), group["max_coeff"])
        param.add_(update, alpha=-size * ratio)


def _norm(tensor: Any) -> torch.Tensor:
    """The norm of the whole tensor, also of a sharded one."""
    found = tensor.norm()
    whole: torch.Tensor = found.full_tensor() if hasattr(found, "full_tensor") else found
    return whole
