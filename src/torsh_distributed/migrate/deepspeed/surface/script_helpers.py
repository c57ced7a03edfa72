"""`deepspeed.utils`: logging on some ranks, devices of new tensors, memory in words, groups of ranks."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.surface.device_accelerator import get_accelerator

logger = logging.getLogger("DeepSpeed")
F = TypeVar("F", bound=Callable[..., Any])

_LEAF = "_z3_leaf"
_own_group: Any = None


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO, **_: object) -> None:
    """Log on some ranks; None or -1 means all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


_logged: set[str] = set()


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message the first time only."""
    if message not in _logged:
        _logged.add(message)
        log_dist(message, ranks, level)


def warning_once(message: str) -> None:
    """Warn of something the first time only."""
    log_dist_once(message, level=logging.WARNING)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """The level of the messages: debug, info, warning, error or critical."""
    level = logging.getLevelName(log_level_str.upper())
    if not isinstance(level, int):
        raise InvalidArgument(f"{log_level_str} is not one of the log levels: debug, info, warning, error, critical")
    (custom_logger or logger).setLevel(level)


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    """Log on rank 0."""
    log_dist(message, ranks=[0])


def see_memory_usage(message: str, force: bool = False, **_: object) -> None:
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


Modules = list[nn.Module]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> Modules:
    """Modules whose parameters are gathered together; call it before `initialize`. Returns the modules."""
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> Modules:
    """Take the mark away."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[Modules, list[str]]:
    """Mark modules by their names in the model; returns them, and the names that match none."""
    known = dict(model.named_modules())
    missing = [name for name in module_names if name not in known]
    return _mark([known[name] for name in module_names if name in known], flag), _required(
        missing, raise_if_not_found, f"No modules named {missing} found in model {model}"
    )


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[Modules, list[str]]:
    """Mark modules by the ends of their names; returns them, and the ends that match none."""
    named = dict(model.named_modules())
    found = [one for name, one in named.items() if name.endswith(tuple(module_name_suffixes))]
    missing = [end for end in module_name_suffixes if not any(name.endswith(end) for name in named)]
    return _mark(found, flag), _required(
        missing, raise_if_not_found, f"No modules matching suffixes {missing} found in model {model}"
    )


def _mark_classes(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, raise_if_not_found: bool
) -> Modules:
    require(all(isinstance(one, type | str) for one in classes), "leaf_module_classes must be classes or their names")
    found = [module for module in model.modules() if _is_one_of(module, classes)]
    _required(
        [] if found else [str(one) for one in classes],
        raise_if_not_found,
        f"No modules of type {classes} found in model {model}",
    )
    return _mark(found, flag)


def _mark(modules: Modules, flag: bool) -> Modules:
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules


def _required(missing: list[str], raises: bool, message: str) -> list[str]:
    if missing and raises:
        raise InvalidArgument(message, hint="the names are those of model.named_modules()")
    return missing


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module."""
    setattr(model, _LEAF, flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(getattr(model, _LEAF, False))


def z3_leaf_parameter(param: nn.Parameter) -> bool:
    """Whether a parameter was marked by its module."""
    return bool(getattr(param, "ds_z3_leaf_module", None))


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


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """An attribute by its dotted path: `encoder.layers.0.weight`."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Set an attribute by its dotted path."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def get_caller_func(frame: int = 3) -> str:
    """The name of the function that many calls above this one."""
    return inspect.stack()[frame].function


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

    def own_group() -> Any:
        """The ranks that share this rank's layers: itself. Every rank calls this the first time."""
        global _own_group
        if _own_group is None:
            _own_group = dist.new_subgroups(group_size=1)[0]  # type: ignore[no-untyped-call]  # untyped in torch
        return _own_group

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
            names[f"{start}{axis}_group"] = own_group
    names["get_tensor_model_parallel_src_rank"] = process_group.rank
    names["_get_sequence_data_parallel_group"] = names["_get_data_parallel_group"]
    names["_get_sequence_data_parallel_rank"] = process_group.rank
    names["_get_sequence_data_parallel_world_size"] = process_group.world_size
    return names
