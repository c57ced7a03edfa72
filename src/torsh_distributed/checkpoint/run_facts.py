"""Facts about the run that a checkpoint carries: versions, the commit of the program, the plan, the model's config."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.state.held_state import (
    HeldState,
    SavedState,
    extra_states,
    load_model,
    load_optimizer,
    model_tensors,
    optimizer_state,
)
from torsh_distributed.parallel.state.held_tensors import HeldTensor, local_part_of
from torsh_distributed.parallel.state.whole_state import StateParts, shared_names

PRETRAINED = "_pretrained"
"""Among a checkpoint's values: what `from_pretrained` needs beside the tensors, by the name of the saved object."""


def versions() -> dict[str, str]:
    """Of the libraries that the state depends on."""
    torch = sys.modules.get("torch")
    return _own_versions() if torch is None else {**_own_versions(), "torch": str(torch.__version__)}


@functools.cache
def _own_versions() -> dict[str, str]:
    """Kept: our own version is read from the installed package, which takes milliseconds."""
    from torsh_distributed import __version__

    return {"torsh-distributed": __version__, "python": platform.python_version()}


def hash_of_plan(plan: dict[str, Any]) -> str:
    """The same for equal plans, whatever file they came from."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def pretrained_facts(model: nn.Module, shared: Callable[[], Mapping[str, str]]) -> dict[str, Any] | None:
    """For an export: a transformers model's config and its further names of tensors (`shared`); None for others."""
    config: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    if not callable(getattr(config, "to_json_string", None)) or hasattr(model, "peft_config"):
        return None
    from torsh_distributed.parallel.models.same_model import user_class

    return {
        "config": config.to_json_string(),
        "generation": None if generation is None else generation.to_json_string(),
        "architecture": user_class(model).__name__,
        "shared": dict(shared()),
    }


@functools.cache
def git_commit() -> str | None:
    """The commit of the repository that the program was started in, without running git; None outside of one."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        git = folder / ".git"
        try:
            if git.is_file():  # a worktree: the file names its directory
                git = (folder / git.read_text().removeprefix("gitdir:").strip()).resolve()
            if not git.is_dir():
                continue
            return _commit(git)
        except OSError:
            return None
    return None


def _commit(git: Path) -> str | None:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    common = git / "commondir"
    for place in (git, (git / common.read_text().strip()).resolve() if common.exists() else git):
        if (place / name).exists():
            return (place / name).read_text().strip()
        packed = place / "packed-refs"
        for line in packed.read_text().splitlines() if packed.exists() else ():
            commit, _, ref = line.partition(" ")
            if ref == name:
                return commit
    return None


_TENSOR = "__tensor__"
"""Key of the entry that stands for a tensor among an object's plain values."""


def describe(objects: Mapping[str, Any]) -> HeldState:
    """This rank's part of the objects' state. Modules and optimizers may hold DTensors, as FSDP2 makes them."""
    state = HeldState()
    for key, value in objects.items():
        if "." in key or key.startswith("_"):
            raise InvalidArgument("a name of an object has no dot and no leading underscore", name=key)
        if isinstance(value, nn.Module):
            module = _unwrapped(value)
            state.tensors += model_tensors(module, StateParts(), key)
            state.values[key] = extra_states(module)
            facts = pretrained_facts(module, partial(shared_names, module))
            if facts is not None:
                state.values.setdefault(PRETRAINED, {})[key] = facts
        elif isinstance(value, Optimizer):
            held, state.values[key] = optimizer_state(_model_of(value, objects), value, StateParts(), key)
            state.tensors += held
        else:
            given = value.state_dict() if hasattr(value, "state_dict") else value
            state.tensors += [
                HeldTensor(name, StateParts().layout(name, one), one.dtype, partial(local_part_of, one))
                for name, one in _tensors(given, key)
            ]
            state.values[key] = _plain(given, key)
    return state


def further_names(objects: Mapping[str, Any]) -> dict[str, str]:
    """Every further name of a shared tensor of the modules to its first one."""
    return {
        f"{key}.{name}": f"{key}.{first}"
        for key, value in objects.items()
        if isinstance(value, nn.Module)
        for name, first in shared_names(_unwrapped(value)).items()
    }


def restore(objects: Mapping[str, Any], saved: SavedState) -> dict[str, Any]:
    """Load every object in place; returns the values of those that are plain values, not objects."""
    returned: dict[str, Any] = {}
    for key, value in objects.items():
        if key not in saved.values:
            continue
        if isinstance(value, nn.Module):
            load_model(_unwrapped(value), saved, StateParts(), key)
        elif isinstance(value, Optimizer):
            load_optimizer(_model_of(value, objects), value, saved, StateParts(), key)
        elif hasattr(value, "load_state_dict"):
            now = dict(_tensors(value.state_dict(), key))
            value.load_state_dict(_filled(saved.values[key], saved, now))
        else:
            returned[key] = _filled(saved.values[key], saved, dict(_tensors(value, key)))
    return returned


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, so names are the model's own."""
    inner = getattr(model, "module", None)
    is_wrapper = type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel")
    return inner if is_wrapper and isinstance(inner, nn.Module) else model


def _model_of(optimizer: Optimizer, objects: Mapping[str, Any]) -> nn.Module:
    """The module among the objects that has the optimizer's parameters."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for value in objects.values():
        if isinstance(value, nn.Module) and held <= {id(param) for param in value.parameters()}:
            return _unwrapped(value)
    raise InvalidArgument(
        "an optimizer is saved by the names of its parameters, and no module given with it has them",
        hint='give the module too: {"model": model, "optimizer": optimizer}',
    )


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(part, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _tensors(part, f"{path}.{number}")


def _plain(value: Any, path: str) -> Any:
    """The value with a reference in place of each tensor."""
    if isinstance(value, Tensor):
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        return {key: _plain(part, f"{path}.{key}") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(part, f"{path}.{number}") for number, part in enumerate(value))
    return value


def _filled(value: Any, saved: SavedState, now: Mapping[str, Tensor]) -> Any:
    """The value with tensors for references: sharded as the object's own is now, or whole."""
    if isinstance(value, dict) and set(value) == {_TENSOR}:
        name = value[_TENSOR]
        kind, like = saved.tensors[name], now.get(name)
        if like is not None and hasattr(like, "device_mesh") and tuple(like.shape) == kind.shape:
            saved.fill(name, StateParts().layout(name, like), local_part_of(like))
            return like
        whole = torch.empty(kind.shape, dtype=kind.dtype, device="cpu" if like is None else like.device)
        saved.fill(name, StateParts().layout(name, whole), whole)
        return whole
    if isinstance(value, dict):
        return {key: _filled(part, saved, now) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(part, saved, now) for part in value)
    return value
