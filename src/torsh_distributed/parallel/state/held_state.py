"""State of model and optimizer as each rank holds it: described for a checkpoint, and filled from one.

Unlike `whole_state` nothing is gathered: a rank gives its own boxes of the whole tensors and reads those it needs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_distributed.errors import CheckpointError, InvalidArgument
from torsh_distributed.parallel.state.held_tensors import HeldTensor, WholeLayout, local_part_of
from torsh_distributed.parallel.state.whole_state import StateParts, named_params, plain_name

MODEL, OPTIMIZER = "model", "optimizer"
"""How names of tensors start, unless told otherwise: `model.head.weight`, `optimizer.state.head.weight.exp_avg`."""


@dataclass
class HeldState:
    """This rank's part of a training state."""

    tensors: list[HeldTensor] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """Everything else, plain values that are equal on all ranks."""


class SavedTensor(NamedTuple):
    """What is known of a tensor in a checkpoint without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class SavedState(ABC):
    """A saved state to load from; a rank reads the boxes that it needs."""

    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, Any]

    @abstractmethod
    def fill(self, name: str, layout: WholeLayout, local: Tensor) -> None:
        """Fill this rank's tensor with its boxes of the whole one, in place; no communication."""


class StoredTensor(NamedTuple):
    """A tensor that is not in a plain tensor's memory: read and written through functions."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    is_whole: bool = False
    """Whether it is one value for the whole parameter, equal on all ranks, and not a part of one like it."""


@runtime_checkable
class StoredOptimizer(Protocol):
    """An optimizer that keeps its state in storage of its own, one parameter at a time in memory."""

    def stored_state(self, param: Tensor) -> Mapping[str, StoredTensor]:
        """What is kept of a parameter, to read later; empty if it was never updated."""

    def put_state(self, param: Tensor, state: Mapping[str, Any] | None) -> None:
        """Store a parameter's state; None for a parameter that was never updated."""


class StoredParams(StateParts):
    """How to reach parameters that are not in their tensors' memory."""

    def stored(self, param: Tensor) -> tuple[StoredTensor, Callable[[Tensor], None]] | None:
        """Where a parameter is and how to write it; None for one in its own memory."""
        return None


def held_state(
    model: nn.Module, trained: nn.Module, optimizer: Optimizer, parts: StateParts, optimizer_parts: StateParts
) -> HeldState:
    """This rank's part of a model, and of the optimizer over the parameters of `trained`; every rank calls this."""
    tensors, values = model_tensors(model, parts), {MODEL: extra_states(model)}
    held, values[OPTIMIZER] = optimizer_state(trained, optimizer, optimizer_parts)
    return HeldState(tensors + held, values)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers by plain name, a shared one under each of its names, as in `state_dict`."""
    for where, module in model.named_modules(remove_duplicate=False):
        transient = module._non_persistent_buffers_set
        own = {name: value for name, value in module._buffers.items() if name not in transient}
        for name, value in {**module._parameters, **own}.items():
            if value is not None:
                yield plain_name(f"{where}.{name}" if where else name), value


def model_tensors(model: nn.Module, parts: StateParts, key: str = MODEL) -> list[HeldTensor]:
    """This rank's part of the model's tensors; those on the meta device are held by other ranks."""
    found = []
    for name, value in named_tensors(model):
        stored = parts.stored(value) if isinstance(parts, StoredParams) else None
        if stored is not None:
            source, write = stored
            like = torch.empty(source.shape, dtype=source.dtype, device="meta")
            found.append(HeldTensor(f"{key}.{name}", parts.layout(name, like), source.dtype, source.read, write))
        elif not value.is_meta:
            layout = parts.layout(name, value)
            found.append(HeldTensor(f"{key}.{name}", layout, value.dtype, partial(local_part_of, value)))
    return found


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules keep beside tensors (`get_extra_state`), by plain name."""
    return {
        plain_name(f"{where}._extra_state" if where else "_extra_state"): module.get_extra_state()
        for where, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def load_model(model: nn.Module, saved: SavedState, parts: StateParts, key: str = MODEL) -> None:
    """Fill this rank's part of the model's tensors; names that were not saved keep their values."""
    for held in model_tensors(model, parts, key):
        if held.name in saved.tensors:
            fill_held(held, saved)
    extra = saved.values.get(key, {})
    for where, module in model.named_modules():
        name = plain_name(f"{where}._extra_state" if where else "_extra_state")
        if name in extra:
            module.set_extra_state(extra[name])


def fill_held(held: HeldTensor, saved: SavedState) -> None:
    """Fill this rank's part of one tensor, in place or through its storage."""
    if held.write is None:
        saved.fill(held.name, held.layout, held.read())
        return
    local = torch.empty(held.layout.local_shape, dtype=held.dtype)
    saved.fill(held.name, held.layout, local)
    held.write(local)


def optimizer_state(
    model: nn.Module, optimizer: Optimizer, parts: StateParts, key: str = OPTIMIZER
) -> tuple[list[HeldTensor], dict[str, Any]]:
    """This rank's part of the optimizer's tensors, and everything else of its state; every rank calls this."""
    start = f"{key}.state."
    names = {id(param): parts.first_name(name) for name, param in named_params(model).items()}
    tensors: list[HeldTensor] = []
    plain: dict[str, dict[str, Any]] = {}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # Asked once: whether an object follows a protocol takes longer than to describe a tensor.
    stored_by = optimizer if isinstance(optimizer, StoredOptimizer) else None
    for param in params:
        name = names[id(param)]
        if stored_by is not None:
            for entry, stored in stored_by.stored_state(param).items():
                layout = _layout_of_stored(parts, name, param, stored)
                tensors.append(HeldTensor(f"{start}{name}.{entry}", layout, stored.dtype, stored.read))
            continue
        if param not in optimizer.state:
            continue
        parts.check(name, param, optimizer)
        for entry, value in optimizer.state[param].items():
            if isinstance(value, Tensor):
                layout = _layout_of_value(parts, name, param, value)
                read = partial(local_part_of, value)
                tensors.append(HeldTensor(f"{start}{name}.{entry}", layout, value.dtype, read))
            else:
                plain.setdefault(name, {})[entry] = value
    groups = parts.all_groups([[names[id(param)] for param in group["params"]] for group in optimizer.param_groups])
    settings = [_settings(group) for group in optimizer.param_groups]
    return tensors, {
        "param_groups": [{**one, "params": held} for one, held in zip(settings, groups, strict=True)],
        "plain": parts.all_plain(plain),
    }


def _layout_of_stored(parts: StateParts, name: str, param: Tensor, stored: StoredTensor) -> WholeLayout:
    """Of a stored value: a scalar, one for the whole parameter, or the shape of this rank's part of it."""
    if not stored.shape or stored.is_whole:
        return StateParts().layout(name, torch.empty(stored.shape, device="meta"))
    return parts.layout(name, parts.like(param))


def _is_one_number(shape: Sequence[int]) -> bool:
    """Whether it is a number for the whole parameter, which some optimizers keep as a tensor of shape (1,)."""
    return math.prod(shape) == 1


def _layout_of_value(parts: StateParts, name: str, param: Tensor, value: Tensor) -> WholeLayout:
    if value.dim() and value.shape == param.shape:
        return parts.layout(name, value)
    is_split = parts.runs(name, param.shape)[0] != list(param.shape)
    if is_split and not _is_one_number(value.shape):
        raise InvalidArgument(
            f"the optimizer keeps a value for {name} in another shape than the parameter, which the plan splits",
            hint="use an optimizer whose state has the shape of the parameter, such as AdamW",
            value=tuple(value.shape),
            parameter=tuple(param.shape),
        )
    return StateParts().layout(name, value)


def load_optimizer(
    model: nn.Module, optimizer: Optimizer, saved: SavedState, parts: StateParts, key: str = OPTIMIZER
) -> None:
    """Fill this rank's part of the optimizer's state; the groups must hold the same parameters in the same order."""
    names = {id(param): parts.first_name(name) for name, param in named_params(model).items()}
    state = saved.values[key]
    mine = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    groups = [list(group["params"]) for group in state["param_groups"]]
    if not parts.fits(mine, groups):
        raise CheckpointError(
            "the checkpoint is of an optimizer with other parameters or groups",
            hint="build the optimizer as it was when the checkpoint was saved, or load the model alone",
            groups=[len(group) for group in mine],
            saved_groups=[len(group) for group in groups],
        )
    by_param = _saved_keys(saved, f"{key}.state.")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    values: dict[int, dict[str, Any]] = {}
    stored_by = optimizer if isinstance(optimizer, StoredOptimizer) else None
    for number, param in enumerate(params):
        if not parts.keeps(param):
            continue
        name = names[id(param)]
        found = by_param.get(name, {})
        now = {} if stored_by is not None else optimizer.state.get(param, {})
        kept = {entry: _read_value(saved, parts, name, full, param, now.get(entry)) for entry, full in found.items()}
        kept |= state["plain"].get(name, {})
        if stored_by is not None:
            stored_by.put_state(param, kept or None)
        elif kept:
            kept.pop("master", None)  # of an offloaded optimizer; this one updates the parameters themselves
            values[number] = kept
    if stored_by is not None:
        for group, given in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update(_settings(given))
        return
    index = {id(param): number for number, param in enumerate(params)}
    optimizer.load_state_dict(
        {
            "state": values,
            "param_groups": [
                {**_settings(given), "params": [index[id(param)] for param in group["params"]]}
                for given, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
            ],
        }
    )


def _saved_keys(saved: SavedState, start: str) -> dict[str, dict[str, str]]:
    """Parameter name to the optimizer's keys for it, each with the full name of its tensor."""
    found: dict[str, dict[str, str]] = {}
    for full in saved.tensors:
        if full.startswith(start):
            name, _, entry = full[len(start) :].rpartition(".")
            found.setdefault(name, {})[entry] = full
    return found


def _read_value(
    saved: SavedState, parts: StateParts, name: str, full: str, param: Tensor, now: Tensor | None
) -> Tensor:
    """The optimizer's tensor `full` of a parameter, in the form this rank keeps it; in place of `now` if that fits.

    In place, because the state of all parameters would otherwise be in memory twice until the last one is read.
    """
    kind, like = saved.tensors[full], parts.like(param)
    layout = parts.layout(name, like)
    device = local_part_of(like).device
    device = torch.device("cpu") if device.type == "meta" or not kind.shape else device
    if kind.shape and kind.shape == layout.shape:
        if isinstance(now, Tensor) and _has_form_of(now, like) and now.dtype == kind.dtype:
            saved.fill(full, layout, local_part_of(now))
            return now
        local = torch.empty(layout.local_shape, dtype=kind.dtype, device=device)
        saved.fill(full, layout, local)
        return _in_form_of(like, local)
    if not _is_one_number(kind.shape) and layout.local_shape != layout.shape:
        raise CheckpointError(
            f"{full} has another shape than its parameter, of which this rank holds a part",
            hint="load it under a plan that does not split the parameter",
            saved=kind.shape,
            parameter=layout.shape,
        )
    whole = torch.empty(kind.shape, dtype=kind.dtype, device=device)
    saved.fill(full, StateParts().layout(name, whole), whole)
    return whole


def _has_form_of(one: Tensor, like: Tensor) -> bool:
    """Whether a tensor has the shape and device of another, and its shards if it is sharded."""
    is_sharded = hasattr(like, "device_mesh")
    if hasattr(one, "device_mesh") != is_sharded or one.shape != like.shape or one.device != like.device:
        return False
    return not is_sharded or (one.device_mesh, one.placements) == (like.device_mesh, like.placements)  # type: ignore[attr-defined]  # DTensors


def _in_form_of(like: Tensor, local: Tensor) -> Tensor:
    """`local` as this rank's shard of a tensor sharded like `like`."""
    if not hasattr(like, "device_mesh"):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor), "only DTensors have a mesh"
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
