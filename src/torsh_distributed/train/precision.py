"""The number format of a step, and loss scaling for fp16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.errors import NonFiniteLoss
from torsh_distributed.plan import PrecisionConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Under fp8 everything but the products of fp8 layers is computed in bf16."""


class Precision:
    """Computes in one number format; gradients and updates are unchanged."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    @property
    def is_full(self) -> bool:
        """Whether products are computed in fp32."""
        return self._dtype is torch.float32

    @property
    def loss_scale(self) -> float | None:
        """The factor applied to the next loss before backward; None where losses are not scaled."""
        return None

    def computing(self) -> AbstractContextManager[None]:
        """Around forward and loss: matrix products in this format, reductions that need it in fp32."""
        if self._dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss

    def unscale(self, optimizer: Optimizer) -> bool:
        """Undo the loss scale; False if this step must be skipped, the same answer on every rank."""
        return True

    def update(self, optimizer: Optimizer) -> None:
        """The optimizer's step, after `unscale` and clipping; also called for a skipped step."""
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """What the next steps depend on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict()`; state saved under another precision is ignored."""


class ScaledPrecision(Precision):
    """fp16: losses are scaled up so small gradients stay above zero; all ranks skip steps that overflow.

    The scale halves at an overflow and doubles after `loss_scale_growth_interval` steps without one.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        super().__init__(torch.float16, device)
        self._scaler = _AgreeingScaler(
            device.type, init_scale=config.init_loss_scale, growth_interval=config.loss_scale_growth_interval
        )
        # Read once a step: reading the scaler waits for the device.
        self._loss_scale = float(self._scaler.get_scale())

    @property
    @override
    def loss_scale(self) -> float:
        return self._loss_scale

    @override
    def scaled(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)

    @override
    def unscale(self, optimizer: Optimizer) -> bool:
        self._scaler.unscale_(optimizer)
        return not self._scaler.has_overflow

    @override
    def update(self, optimizer: Optimizer) -> None:
        self._scaler.step(optimizer)  # does nothing after an overflow
        self._scaler.update()
        self._loss_scale = float(self._scaler.get_scale())
        if self._scaler.has_overflow and self.loss_scale < 1:
            raise NonFiniteLoss(
                "gradients overflow fp16 at every loss scale down to 1",
                hint='lower the learning rate, or use precision.dtype = "bf16", which has the range of fp32',
                loss_scale=self.loss_scale,
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._scaler.load_state_dict(dict(state))
            self._loss_scale = float(self._scaler.get_scale())


class _AgreeingScaler(GradScaler):
    """torch's scaler, with overflow on one rank shared with all: otherwise the ranks' parameters would diverge."""

    has_overflow = False

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        per_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flag = torch.stack([flag.to(found_inf.device).reshape(()) for flag in [found_inf, *per_device.values()]]).max()
        all_reduce(flag, "max")
        self.has_overflow = bool(flag)
        return {found_inf.device: flag.reshape(found_inf.shape)}


def make_precision(config: PrecisionConfig, device: torch.device) -> Precision:
    """The precision that a plan names."""
    if config.dtype == "fp16":
        return ScaledPrecision(config, device)
    return Precision(_DTYPES[config.dtype], device)


def cast_buffers(model: nn.Module, config: PrecisionConfig) -> None:
    """Give the model's floating buffers the plan's `buffer_dtype`, in place."""
    if config.buffer_dtype == "same":
        return
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[name] = buffer.to(_DTYPES[config.buffer_dtype])


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
