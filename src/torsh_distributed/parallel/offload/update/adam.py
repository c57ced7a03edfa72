"""Adam and AdamW on flat tensors with torch's fused kernels: multi-threaded on the host, one launch on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.optim.cpu_adam import CpuAdam
from torsh_distributed.parallel.torch_internals import _fused_adam_, _fused_adamw_


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamSettings:
    """The update settings of a parameter group."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_decoupled: bool
    """AdamW: weight decay shrinks the parameter instead of adding to the gradient."""
    is_maximizing: bool

    @classmethod
    def of(cls, group: Mapping[str, Any], *, is_decoupled: bool) -> AdamSettings:
        """The present settings of a group; schedulers change them between steps."""
        beta1, beta2 = group["betas"]
        return cls(
            learning_rate=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            is_decoupled=is_decoupled,
            is_maximizing=group.get("maximize", False),
        )


def require_adam(optimizer: Optimizer) -> None:
    """Raise InvalidArgument unless the optimizer's update is one we implement."""
    if type(optimizer) not in (Adam, AdamW, CpuAdam):
        raise InvalidArgument(
            f"offload supports Adam and AdamW, not {type(optimizer).__name__}",
            hint="use Adam or AdamW of torch.optim, or CpuAdam, or turn offload.optimizer_state off and shard",
        )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise InvalidArgument("offload does not support amsgrad", hint="set amsgrad=False")


def is_decoupled(optimizer: Optimizer) -> bool:
    """Whether weight decay is decoupled, as in AdamW."""
    return isinstance(optimizer, AdamW) or bool(optimizer.param_groups[0].get("decoupled_weight_decay", False))


def adam_update(
    values: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: Tensor,
    settings: AdamSettings,
    grad_divisor: Tensor | None,
) -> None:
    """Do update number `step` (a tensor of one fp32 value, from 1) in place; all tensors are 1-D fp32 on one device.

    `grad_divisor`, also one value, first divides the gradient in place, so clipping needs no extra pass.
    """
    kernel = _fused_adamw_ if settings.is_decoupled else _fused_adam_
    kernel(
        [values],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        lr=settings.learning_rate,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=settings.is_maximizing,
        grad_scale=grad_divisor,
        found_inf=None,
    )
