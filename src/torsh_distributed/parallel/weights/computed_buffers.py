"""Buffers that no checkpoint holds, such as rotary tables: computed again for a model built on the meta device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.models.materialize import ParamInit, model_init


def compute_buffers(model: nn.Module, device: torch.device, *, init_fn: ParamInit | None = None) -> None:
    """Compute the buffers on meta that are no part of the model's state, in place, on `device`.

    By `init_fn(module)`, the model's own `_init_weights(module)` (transformers) or the module's `reset_parameters()`,
    called while the parameters are on meta, where filling them does nothing. InvalidArgument names a module that has
    none of these, or whose initializer leaves a buffer out.
    """
    for module, init in list(_computed_buffers(model, init_fn)):
        _compute(module, init, device)


def _computed_buffers(model: nn.Module, init_fn: ParamInit | None) -> Iterator[tuple[nn.Module, ParamInit]]:
    """Modules on meta with buffers that are no part of the model's state, each with what fills them."""
    kept = {id(value) for value in model.state_dict(keep_vars=True).values()}
    for path, module in model.named_modules():
        lacking = [
            name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta and id(buffer) not in kept
        ]
        if not lacking:
            continue
        init = init_fn or model_init(model, path) or _own_init(module)
        if init is None:
            raise InvalidArgument(
                f"{path or 'the model'} ({type(module).__name__}) computes {', '.join(lacking)} when it is built, which"
                " the meta device does not",
                hint="give the module a reset_parameters() that computes it, or pass param_init_fn",
                module=path,
            )
        yield module, init


def _own_init(module: nn.Module) -> ParamInit | None:
    return (lambda one: one.reset_parameters()) if callable(getattr(module, "reset_parameters", None)) else None  # type: ignore[operator]  # just checked


def _compute(module: nn.Module, init: ParamInit, device: torch.device) -> None:
    """Fill a module's buffers; its parameters are still on meta, where filling them does nothing."""
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.full_like(buffer, _unset(buffer.dtype), device=device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        init(module)
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.numel() and _is_unset(buffer):
            raise InvalidArgument(
                f"{type(module).__name__} computes {name} when it is built, and its initializer does not",
                hint="let param_init_fn compute it, or build this module outside the meta device",
            )


def _unset(dtype: torch.dtype) -> float | int | bool:
    """A value that no table is full of; bool has none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min if dtype.is_signed else torch.iinfo(dtype).max


def _is_unset(buffer: Tensor) -> bool:
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        return bool(buffer.isnan().all())
    return buffer.dtype != torch.bool and bool((buffer == _unset(buffer.dtype)).all())
