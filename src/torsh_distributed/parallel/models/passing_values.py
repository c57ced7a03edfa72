"""Values for a run of a model that has none: each module gets them when it is called and loses them when it returns.

A model on the meta device can then be run on a few tokens to see what runs when, and no rank holds it whole. The values
are random, the same at every call: two runs can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from torsh_distributed.parallel.torch_internals import tree_leaves

_device: ContextVar[torch.device | None] = ContextVar("device of values that pass", default=None)

_PERIOD = 4093
"""Prime, so no row of a matrix repeats the one before."""


def run_device(model: nn.Module) -> torch.device:
    """Where a run of the model computes: the device of its parameters, or of the values that they get for a run."""
    passing = _device.get()
    return passing or next((param.device for param in model.parameters()), torch.device("cpu"))


@contextmanager
def passing_values(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, modules of `model` with parameters on meta have values on `device` while they are called.

    What a module reads of another one, without calling it, stays on meta: such a forward raises RuntimeError.
    """
    seeds = {id(param): number for number, param in enumerate(model.parameters())}
    token = _device.set(device)
    try:
        with ExitStack() as stack:
            stack.enter_context(_RequireValues())
            for module in model.modules():
                own = [*module._parameters.values(), *module._buffers.values()]
                if any(one is not None and one.is_meta for one in own):
                    _hook(module, seeds, device, stack)
            yield
    finally:
        _device.reset(token)


class _RequireValues(TorchFunctionMode):
    """Raises where an operation takes a tensor on meta and returns another one: torch computes garbage with them."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_real = any(isinstance(one, Tensor) and not one.is_meta for one in tree_leaves(out))
        if is_real and any(isinstance(one, Tensor) and one.is_meta for one in tree_leaves((args, kwargs))):
            raise RuntimeError("the forward reads a parameter of a module that it does not call")
        return out


def _hook(module: nn.Module, seeds: dict[int, int], device: torch.device, stack: ExitStack) -> None:
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def enter(called: nn.Module, _: Any) -> None:
        before = (dict(called._parameters), dict(called._buffers))
        held.append(before)
        for name, param in before[0].items():
            if param is not None and param.is_meta:
                value = _value(param, seeds.get(id(param), 0), device)
                called._parameters[name] = nn.Parameter(value, requires_grad=param.requires_grad)
        for name, buffer in before[1].items():
            if buffer is not None and buffer.is_meta:
                called._buffers[name] = torch.ones(buffer.shape, dtype=buffer.dtype, device=device)

    def leave(called: nn.Module, *_: Any) -> None:
        params, buffers = held.pop()
        called._parameters.update(params)
        called._buffers.update(buffers)

    def restore() -> None:
        if held:  # a forward that ended with an exception
            module._parameters.update(held[0][0])
            module._buffers.update(held[0][1])

    before = module.register_forward_pre_hook(enter)
    after = module.register_forward_hook(leave, always_call=True)
    stack.callback(restore)
    stack.callback(before.remove)
    stack.callback(after.remove)


def _value(param: Tensor, seed: int, device: torch.device) -> Tensor:
    """Random values at which a layer changes what passes through it and keeps its size; repeated, to be quick."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(_PERIOD, generator=generator) - 0.5
    values = 1 + drawn if param.dim() < 2 else drawn * (12 / max(1, param.shape[-1])) ** 0.5
    few = values.to(device=device, dtype=param.dtype)
    return few.repeat(-(-param.numel() // _PERIOD))[: param.numel()].view(param.shape)
