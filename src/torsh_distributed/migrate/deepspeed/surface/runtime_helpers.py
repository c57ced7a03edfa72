"""`deepspeed.runtime.utils`: small functions that scripts borrow."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.surface.device_accelerator import get_accelerator
from torsh_distributed.migrate.deepspeed.surface.script_helpers import see_memory_usage

F = TypeVar("F", bound=Callable[..., Any])


class DummyOptim:
    """Holds parameters in the place of an optimizer."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.param_groups = [{"params": params}]


def noop_decorator(func: F) -> F:
    """The function itself."""
    return func


@contextmanager
def noop_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    """A context that does nothing."""
    yield


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Make the directory of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] = lambda _: True) -> Any:
    """Nested values with their tensors on a device; `criterion_func` chooses the tensors."""
    if isinstance(item, Tensor):
        return item.to(device) if criterion_func(item) else item
    if isinstance(item, Mapping):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(move_to_device(value, device, criterion_func) for value in item)
    return item


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """Nested values with copies of the chosen tensors on a device."""
    return move_to_device(item, device, criterion_func)


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log the memory in use."""
    if reset_max:
        get_accelerator().reset_peak_memory_stats()
    see_memory_usage(msg, force=True)


def empty_cache() -> None:
    """Give unused memory back, and forget its peak."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Torch's: of whole parameters. An engine clips by itself, as gradient_clipping says."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The norm of what has these norms."""
    return float(sum(norm**2 for norm in norm_list) ** 0.5)


def get_weight_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of parameters as this rank holds them; -1 if it is not finite."""
    return _norm_of([parameters] if isinstance(parameters, Tensor) else list(parameters), norm_type)


def get_grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of gradients as this rank holds them; -1 if it is not finite. An engine's is get_global_grad_norm()."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return _norm_of([param.grad for param in given if param.grad is not None], norm_type)


def _norm_of(tensors: Sequence[Tensor], norm_type: float) -> float:
    if not tensors:
        return 0.0
    norms = torch.stack([tensor.detach().float().norm(norm_type) for tensor in tensors])
    found = float(norms.norm(norm_type))
    return found if math.isfinite(found) else -1.0


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch is at least, or at most, of a version."""
    require(min_version or max_version, "Must provide a min_version or max_version argument")
    here = TorchVersion(torch.__version__)  # compares numbers, not letters
    is_new = min_version is None or here >= str(min_version)
    return is_new and (max_version is None or here <= str(max_version))


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """The item that all of them are."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected there to be only one unique element in {sorted(map(str, found))}")
    return found.pop()


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call in words."""
    named = [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{base}({', '.join([*map(repr, args), *named])})"
