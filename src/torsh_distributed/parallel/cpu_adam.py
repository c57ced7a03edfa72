"""Adam and AdamW on host memory by a kernel of our own, on torch's optimizer with its state and its settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.native import ADAM_KERNEL, is_stale

# Fewer elements than this are done before another thread has been started.
_ELEMENTS_PER_THREAD = 1 << 17


class CpuAdam(Adam):
    """torch's Adam, or AdamW with `decoupled_weight_decay=True`, for fp32 parameters in host memory: the fastest there.

    Sharded parameters are updated where they lie. The state is torch's: either can load what the other has saved.
    Threads are torch's number (`torch.set_num_threads`). Where the kernel was not compiled torch's fused one is used.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
            foreach=False,  # nor fused: GradScaler leaves it to those that are to divide by its scale
        )

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _refuse_amsgrad(group)
        for param in group["params"]:
            if param.device.type not in ("cpu", "meta") or param.dtype != torch.float32:
                raise InvalidArgument(
                    f"CpuAdam updates fp32 parameters in host memory, not {param.dtype} on {param.device}",
                    hint="use torch.optim.Adam(fused=True)",
                    shape=tuple(param.shape),
                )

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        steps: list[Tensor] = []
        _refuse_amsgrad(group)  # settings come with loaded state, too
        self._init_group(group, params, grads, means, squares, [], steps)  # type: ignore[no-untyped-call]  # untyped in torch
        if not params:
            return
        torch._foreach_add_(steps, 1)
        pieces = [tuple(map(_held, of_one)) for of_one in zip(params, grads, means, squares, strict=True)]
        kernel = compiled_kernel()
        if kernel is None or not all(part.is_contiguous() for piece in pieces for part in piece):
            _by_torch(group, pieces, steps)
            return
        num_elements = sum(piece[0].numel() for piece in pieces)
        kernel.adam(
            [
                (*(part.data_ptr() for part in piece), piece[0].numel(), float(step))
                for piece, step in zip(pieces, steps, strict=True)
            ],
            float(group["lr"]),
            *map(float, group["betas"]),
            group["eps"],
            group["weight_decay"],
            group["decoupled_weight_decay"],
            group["maximize"],
            min(torch.get_num_threads(), 1 + num_elements // _ELEMENTS_PER_THREAD),
        )


def _refuse_amsgrad(group: dict[str, Any]) -> None:
    if group.get("amsgrad"):
        raise InvalidArgument("CpuAdam has no amsgrad", hint="use torch.optim.Adam(amsgrad=True, fused=True)")


def _held(tensor: Tensor) -> Tensor:
    """What this rank holds of it. Not by type: to import DTensor takes a second that many jobs need not spend."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _by_torch(group: dict[str, Any], pieces: list[tuple[Tensor, ...]], steps: list[Tensor]) -> None:
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    values, grads, means, squares = map(list, zip(*pieces, strict=True))
    beta1, beta2 = map(float, group["betas"])
    kernel(
        values,
        grads,
        means,
        squares,
        [],
        [step.float() for step in steps],
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )


@functools.cache
def compiled_kernel() -> Any | None:
    """The compiled module, or None where there is none, or one of other sources than those beside it."""
    # Any: the module has no Python source; its docstrings give the arguments.
    try:
        from torsh_distributed.parallel import _adam  # type: ignore[attr-defined]  # built at install, or not
    except ImportError:
        return None
    return None if is_stale(ADAM_KERNEL, _adam.VERSION) else _adam
