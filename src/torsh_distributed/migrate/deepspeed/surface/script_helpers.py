"""`deepspeed.utils`: logging on some ranks, devices of new tensors, memory in words, groups of ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torsh_distributed.comm.groups import process_group
from torsh_distributed.migrate.deepspeed.surface.device_accelerator import get_accelerator

logger = logging.getLogger("DeepSpeed")
F = TypeVar("F", bound=Callable[..., Any])

_LEAF = "_z3_leaf"


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO, **_: Any) -> None:
    """Log on some ranks; None or -1 means all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    """Log on rank 0."""
    log_dist(message, ranks=[0])


def see_memory_usage(message: str, force: bool = False, **_: Any) -> None:
    """Log the memory in use, with `force`."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    device, gigabyte = get_accelerator(), 2**30
    logger.info(
        "%s | memory in use %.2f GB, at most %.2f GB",
        message,
        device.memory_allocated() / gigabyte,
        device.max_memory_allocated() / gigabyte,
    )


def instrument_w_nvtx(func: F) -> F:
    """A range of the profiler around a function."""

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return run  # type: ignore[return-value]  # the same signature


class OnDevice:
    """Around the construction of a model: its tensors are on `device`, such as `meta`, in `dtype`."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self._dtype, self._enabled = dtype, enabled
        self._device: Any = torch.device(device) if enabled else None
        self._before = torch.get_default_dtype()

    def __enter__(self) -> OnDevice:
        self._before = torch.get_default_dtype()
        if self._enabled:
            self._device.__enter__()
            if self._dtype.is_floating_point:
                torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *error: object) -> None:
        if self._enabled:
            torch.set_default_dtype(self._before)
            self._device.__exit__(*error)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Modules whose parameters are gathered together; call it before `initialize`. Returns the modules."""
    found = [module for module in model.modules() if _is_one_of(module, leaf_module_classes)]
    for module in found:
        set_z3_leaf_module(module, True)
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Take the mark away."""
    found = [module for module in model.modules() if _is_one_of(module, leaf_module_classes)]
    for module in found:
        set_z3_leaf_module(module, False)
    return found


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module."""
    setattr(model, _LEAF, flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(getattr(model, _LEAF, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _is_one_of(module: nn.Module, classes: Sequence[type[nn.Module] | str]) -> bool:
    kind = type(module)
    return any(
        kind.__name__ == one or f"{kind.__module__}.{kind.__qualname__}" == one
        if isinstance(one, str)
        else isinstance(module, one)
        for one in classes
    )


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def group_names() -> dict[str, Any]:
    """What `deepspeed.utils.groups` has: this engine spreads data over all ranks, and every rank has whole layers."""

    def data_group() -> Any:
        """The ranks with other data."""
        return dist.group.WORLD

    def first() -> int:
        """The only rank of its layers."""
        return 0

    def one() -> int:
        """Layers are whole on every rank."""
        return 1

    names: dict[str, Any] = {}
    for start in ("get_", "_get_"):
        names[f"{start}data_parallel_rank"] = process_group.rank
        names[f"{start}data_parallel_world_size"] = process_group.world_size
        names[f"{start}data_parallel_group"] = data_group
        for axis in ("model_parallel", "tensor_model_parallel", "sequence_parallel"):
            names[f"{start}{axis}_rank"] = first
            names[f"{start}{axis}_world_size"] = one
    return names
