"""FairScale's activation checkpointing: `checkpoint_wrapper`, and how a forward can tell whether it runs again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from torsh_distributed.parallel.activation import checkpoint_activations
from torsh_distributed.plan.sections.training import ActivationConfig

_is_checkpointing: ContextVar[bool] = ContextVar("fairscale_is_checkpointing", default=False)
_is_recomputing: ContextVar[bool] = ContextVar("fairscale_is_recomputing", default=False)
_is_disabled: ContextVar[bool] = ContextVar("fairscale_is_checkpointing_disabled", default=False)
_is_called: ContextVar[bool] = ContextVar("fairscale_is_called", default=False)
"""Whether a wrapped module is being called, in contrast to being run again by backward."""


def is_checkpointing() -> bool:
    """Whether the forward that calls this keeps no activations for backward."""
    return _is_checkpointing.get()


def is_recomputing() -> bool:
    """Whether the forward that calls this runs again for backward."""
    return _is_recomputing.get()


def enable_checkpointing() -> AbstractContextManager[None]:
    """Around a forward whose activations are not kept: `is_checkpointing()` is true inside."""
    return _set(_is_checkpointing)


def enable_recomputing() -> AbstractContextManager[None]:
    """Around a forward that runs again: `is_recomputing()` is true inside."""
    return _set(_is_recomputing)


def disable_checkpointing() -> AbstractContextManager[None]:
    """Around forwards of wrapped modules that keep their activations after all."""
    return _set(_is_disabled)


def checkpoint_wrapper(
    module: nn.Module, offload_to_cpu: bool = False, maintain_forward_counter: bool = False
) -> nn.Module:
    """The same module, changed in place: its names and parameters stay, its forward runs again in backward.

    `offload_to_cpu` keeps its inputs in host memory meanwhile. `maintain_forward_counter` has no effect: modules that
    count their calls are restored after the second forward, as all buffers are.
    """
    plain = module.forward
    module.forward = partial(_flagged, plain)
    config = ActivationConfig(strategy="uniform", every_n_layers=1, offload_to_cpu=bool(offload_to_cpu))
    checkpoint_activations(module, config, layers={"": module})
    module.forward = partial(_unless_disabled, plain, module.forward)
    return module


def _unless_disabled(plain: Callable[..., Any], recomputed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _is_disabled.get() or not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    with _set(_is_called):
        return recomputed(*args, **kwargs)


def _flagged(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _set(_is_checkpointing if _is_called.get() else _is_recomputing):
        return plain(*args, **kwargs)


@contextmanager
def _set(flag: ContextVar[bool]) -> Iterator[None]:
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)
