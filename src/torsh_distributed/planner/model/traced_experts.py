"""Experts of transformers in a trace: without loops that depend on values, and in the format that the engine trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from torsh_distributed.parallel.expert.autocast_stacks import cast_expert_stacks
from torsh_distributed.parallel.models.structure import expert_modules

_IMPLEMENTATION = "_experts_implementation"


@contextmanager
def experts_as_trained(model: nn.Module, *, is_cast: bool) -> Iterator[None]:
    """Inside, experts are one grouped product: a loop over those that got tokens depends on values.

    `is_cast`: their stacks are cast as autocast does it with other weights, which is what the engine does in bf16.
    """
    named = list(expert_modules(model))
    config = getattr(model, "config", None)
    has_choice = bool(named) and config is not None and hasattr(config, _IMPLEMENTATION)
    before = getattr(config, _IMPLEMENTATION, None)
    kinds = [(module, type(module)) for module in map(model.get_submodule, named)]
    if has_choice:
        setattr(config, _IMPLEMENTATION, "grouped_mm")
    if is_cast:
        cast_expert_stacks(model)
    try:
        yield
    finally:
        if has_choice:
            setattr(config, _IMPLEMENTATION, before)
        for module, kind in kinds:
            module.__class__ = kind
