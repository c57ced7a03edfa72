"""`FusedAdam` and `DeepSpeedCPUAdam`: torch's and our kernels behind DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adagrad, Adam
from typing_extensions import override

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.parallel.optim.cpu_adam import CpuAdam


def _refuse_amsgrad(amsgrad: bool, name: str) -> None:
    if amsgrad:
        raise FeatureNotAvailable(
            f"{name} does not support the AMSGrad variant.", hint="use torch.optim.AdamW(amsgrad=True)"
        )


class DeepSpeedCPUAdam(CpuAdam):
    """Adam in host memory with our kernel; AdamW unless `adamw_mode` is false. Weight decay is 0 by default.

    May be built over parameters of any dtype: an engine gives it fp32 masters to update.
    """

    optimizer_id = 0

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_amsgrad(amsgrad, "DeepSpeedCPUAdam")
        if not bias_correction:
            raise FeatureNotAvailable("DeepSpeedCPUAdam without bias correction is not supported", hint="leave it on")
        super().__init__(model_params, lr, (betas[0], betas[1]), eps, weight_decay, decoupled_weight_decay=adamw_mode)
        self.adam_w_mode = adamw_mode

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        Adam.add_param_group(self, param_group)

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with our kernel where it can: fp32 in host memory; else as torch does."""
        held = (param for group in self.param_groups for param in group["params"] if param.grad is not None)
        if all(param.dtype is torch.float32 and param.device.type == "cpu" for param in held):
            return super().step(closure)
        return Adam.step(self, closure)


class FusedAdam(Adam):
    """Adam by torch's own kernels; AdamW unless `adam_w_mode` is false. Weight decay is 0 by default.

    On a GPU, torch's fused kernel; in host memory ours is `DeepSpeedCPUAdam`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_amsgrad(amsgrad, "FusedAdam")
        if not bias_correction:
            raise FeatureNotAvailable("FusedAdam without bias correction is not supported", hint="leave it on")
        super().__init__(params, lr, (betas[0], betas[1]), eps, weight_decay, decoupled_weight_decay=adam_w_mode)
        self.adam_w_mode = adam_w_mode

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=True)


class DeepSpeedCPUAdagrad(Adagrad):
    """torch's Adagrad under DeepSpeed's arguments."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
