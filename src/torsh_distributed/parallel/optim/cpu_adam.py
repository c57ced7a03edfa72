"""Adam and AdamW in host memory with our own kernel, on top of torch's optimizer, its state and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Adam
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.native import ADAM_KERNEL, load
from torsh_distributed.parallel.optim.divided_update import DividedUpdate
from torsh_distributed.parallel.torch_internals import _foreach_add_, _fused_adam_, _fused_adamw_

# Fewer elements than this are updated before another thread has started.
_ELEMENTS_PER_THREAD = 1 << 17


class CpuAdam(Adam):
    """torch's Adam, or AdamW with `decoupled_weight_decay=True`, for fp32 parameters in host memory, but faster.

    Sharded parameters are updated in place. The state is torch's: either can load what the other saved. Uses as many
    threads as torch (`torch.set_num_threads`), and torch's fused kernel if ours was not compiled.
    """

    _divided: DividedUpdate | None = None

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
            foreach=False,  # nor fused: GradScaler leaves unscaling to fused optimizers
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

    def divide(self, params: Iterable[Tensor], group: dist.ProcessGroup) -> bool:
        """Let each rank of `group`, where these and their gradients are equal, do a part of every update for all.

        Returns whether it does: if all ranks are on one node and the kernel was compiled. Then all ranks must call
        `step` at the same point, and parameters and state are in memory that they share.
        """
        if compiled_kernel() is not None:
            self._divided = DividedUpdate.of(params, ("exp_avg", "exp_avg_sq"), group)
        return self._divided is not None

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with nullcontext() if self._divided is None else self._divided.updating():
            for group in self.param_groups:
                self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        steps: list[Tensor] = []
        _refuse_amsgrad(group)  # loaded state brings settings too
        self._init_group(group, params, grads, means, squares, [], steps)  # type: ignore[no-untyped-call]  # untyped in torch
        if not params:
            return
        _foreach_add_(steps, 1)
        kernel, divided = compiled_kernel(), self._divided
        alone, together, odd = list[_ParamSlice](), list[_ParamSlice](), list[_ParamSlice]()
        for param, grad, step in zip(params, grads, steps, strict=True):
            state = self.state[param]
            part = None if divided is None else divided.part(param, state)
            value, mean, square = map(_held, (param, state["exp_avg"], state["exp_avg_sq"]))
            tensors = value, _like(value, _held(grad)), mean, square
            if part is not None:
                together.append(_ParamSlice(tensors, step, part))
            elif kernel is not None and all(tensor.is_contiguous() for tensor in tensors):
                alone.append(_ParamSlice(tensors, step, slice(0, tensors[0].numel())))
            else:
                odd.append(_ParamSlice(tensors, step, slice(None)))
        _by_kernel(kernel, group, alone, [])
        _by_kernel(kernel, group, together, [] if divided is None else divided.distances)
        _by_torch(group, odd)


class _ParamSlice(NamedTuple):
    """A parameter, its gradient and both moments; its number of updates; the elements to update."""

    tensors: tuple[Tensor, ...]
    step: Tensor
    part: slice

    def entry(self) -> tuple[float, ...]:
        """The kernel's argument: addresses, number of elements, number of updates."""
        start, stop = self.part.start, self.part.stop
        return (*(tensor.data_ptr() + 4 * start for tensor in self.tensors), stop - start, float(self.step))


def _by_kernel(kernel: Any, group: dict[str, Any], pieces: list[_ParamSlice], distances: list[int]) -> None:
    """Update in place, and at each of `distances`, in bytes, from there."""
    if not pieces:
        return
    num_elements = sum(piece.part.stop - piece.part.start for piece in pieces)
    kernel.adam(
        [piece.entry() for piece in pieces],
        float(group["lr"]),
        *map(float, group["betas"]),
        group["eps"],
        group["weight_decay"],
        group["decoupled_weight_decay"],
        group["maximize"],
        min(torch.get_num_threads(), 1 + num_elements // _ELEMENTS_PER_THREAD),
        distances,
    )


def _refuse_amsgrad(group: dict[str, Any]) -> None:
    if group.get("amsgrad"):
        raise InvalidArgument("CpuAdam has no amsgrad", hint="use torch.optim.Adam(amsgrad=True, fused=True)")


def _held(tensor: Tensor) -> Tensor:
    """What this rank holds of it. Not by type: importing DTensor takes a second that many jobs need not spend."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _like(value: Tensor, grad: Tensor) -> Tensor:
    """The gradient with its elements in the order of the parameter's: kernels, torch's too, ignore strides."""
    return grad if grad.stride() == value.stride() else torch.empty_like(value).copy_(grad)


def _by_torch(group: dict[str, Any], pieces: list[_ParamSlice]) -> None:
    if not pieces:
        return
    kernel = _fused_adamw_ if group["decoupled_weight_decay"] else _fused_adam_
    values, grads, means, squares = map(list, zip(*(piece.tensors for piece in pieces), strict=True))
    beta1, beta2 = map(float, group["betas"])
    kernel(
        values,
        grads,
        means,
        squares,
        [],
        [piece.step.float() for piece in pieces],
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )


def compiled_kernel() -> Any | None:
    """The compiled kernel; None if it was not compiled."""
    return load(ADAM_KERNEL)
