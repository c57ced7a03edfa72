"""Experts of transformers' models in the number format of mixed precision, so that grouped kernels compute them.

Autocast knows `linear` and its kind, not torch's grouped product: a stack of experts stays in fp32, and transformers
then computes expert after expert. Here the stack is cast where the forward reads it, once for each forward, as
autocast does with other weights. Parameters, gradients and the optimizer's state stay as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.parallel.expert.experts import Experts
from torsh_distributed.parallel.models.structure import expert_modules

_ALIGNMENT = 8
"""Elements of 16 bits in 16 bytes: the grouped kernels take matrices whose rows begin at such steps."""


def cast_expert_stacks(model: nn.Module) -> list[str]:
    """Let modules of experts read their matrices in autocast's dtype, in place; returns the modules' names.

    Only matrices: the gradient of a bias is a sum over thousands of rows, which bf16 would round away. Sizes that the
    kernels do not take stay in fp32, as do our own `Experts`, which cast for themselves.
    """
    found = []
    for name in expert_modules(model):
        module = model.get_submodule(name)
        stacks = [key for key, param in module.named_parameters(recurse=False) if _is_stack(param)]
        if stacks and not isinstance(module, Experts) and all(_fits(module._parameters[key]) for key in stacks):
            kind = type(module)
            module.__class__ = _casting(kind, tuple(stacks))  # type: ignore[arg-type]  # classes are hashable
            found.append(name)
    return found


def _is_stack(param: Tensor) -> bool:
    return param.dim() == 3 and param.dtype is torch.float32


def _fits(param: Tensor | None) -> bool:
    return param is not None and all(size % _ALIGNMENT == 0 for size in param.shape[1:])


@functools.cache
def _casting(kind: type[nn.Module], stacks: tuple[str, ...]) -> type[nn.Module]:
    """`kind` with properties in front of its stacks; names of classes, parameters and modules do not change."""
    named: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**named, **{name: _in_autocast_dtype(name) for name in stacks}})


def _in_autocast_dtype(name: str) -> property:
    def read(module: nn.Module) -> Tensor:
        param = module._parameters[name]
        assert param is not None, "it was a parameter"
        kind = param.device.type
        return param.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else param

    return property(read)
