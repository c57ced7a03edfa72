"""Parameters and optimizer state of one rank for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.horovod.collectives.async_calls import broadcast_async_
from torsh_distributed.migrate.horovod.collectives.object_encoding import broadcast_object
from torsh_distributed.migrate.horovod.collectives.operation_submission import synchronize
from torsh_distributed.migrate.horovod.process_sets import ProcessSet, global_process_set
from torsh_distributed.migrate.horovod.world_state import world


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Make parameters equal to those of `root_rank`, in place: a `state_dict`, or a list of tensors or (name, tensor).

    Values of a dict that are not tensors, and missing ones, are skipped.
    """
    pairs = _named(params)
    copies: list[tuple[Tensor, Tensor]] = []
    handles = []
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor):
            continue
        target = tensor.detach()
        if not target.is_contiguous():
            whole = target.contiguous()
            copies.append((target, whole))
            target = whole
        handles.append(broadcast_async_(target, root_rank, name, process_set))
    for handle in handles:
        synchronize(handle)
    for target, received in copies:
        target.copy_(received)


def _named(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if isinstance(params, list):
        return [one if isinstance(one, tuple) else (f"parameter.{index}", one) for index, one in enumerate(params)]
    raise InvalidArgument(
        f"broadcast_parameters takes a state_dict, a list of tensors or a list of (name, tensor), not {type(params)}",
        hint="pass model.state_dict(), or list(model.named_parameters())",
    )


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int, model: nn.Module | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Make the state of an optimizer equal to that of `root_rank`; hyperparameters too.

    Every rank calls this; afterwards all have exactly the state of the root, none if it has none. `model` is Horovod's
    way to create missing state for sparse embeddings, which is not needed here.
    """
    if isinstance(optimizer, LBFGS):
        raise InvalidArgument(
            "the state of LBFGS cannot be broadcast", hint="broadcast its parameters before it starts"
        )
    state = optimizer.state_dict()
    described = _without_tensors(state) if world().rank == root_rank else None
    described = broadcast_object(described, root_rank, "optimizer.state", process_set)
    _receive(optimizer, state, described, root_rank, process_set)


@dataclass(frozen=True)
class _TensorPlace:
    """Where a tensor was, in a state that travels without its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _TensorPlace(tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, dict):
        return {key: _without_tensors(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_tensors(part) for part in value)
    return value


def _receive(optimizer: Optimizer, state: Any, described: Any, root_rank: int, process_set: ProcessSet) -> None:
    handles: list[int] = []

    def filled(mine: Any, theirs: Any, path: str) -> Any:
        if isinstance(theirs, _TensorPlace):
            fits = isinstance(mine, Tensor) and tuple(mine.shape) == theirs.shape and mine.dtype == theirs.dtype
            device = mine.device if isinstance(mine, Tensor) else torch.device(theirs.device)
            source = mine.detach() if fits else torch.empty(theirs.shape, dtype=theirs.dtype, device=device)
            tensor = source.clone(memory_format=torch.contiguous_format)
            handles.append(broadcast_async_(tensor, root_rank, path, process_set))
            return tensor
        if isinstance(theirs, dict):
            ours = mine if isinstance(mine, dict) else {}
            return {key: filled(ours.get(key), part, f"{path}.{key}") for key, part in theirs.items()}
        if isinstance(theirs, list | tuple):
            held = mine if isinstance(mine, list | tuple) else ()
            parts = [
                filled(held[index] if index < len(held) else None, part, f"{path}.{index}")
                for index, part in enumerate(theirs)
            ]
            return type(theirs)(parts)
        return theirs

    whole = filled(state, described, "optimizer")
    for handle in handles:
        synchronize(handle)
    optimizer.load_state_dict(whole)
