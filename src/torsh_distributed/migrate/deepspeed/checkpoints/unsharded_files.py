"""Stage 0 and universal checkpoints: state that is whole in its files.

Stage 0 keeps the optimizer's state by number, not by name. The names follow from the order of parameters: each group is
taken for a part of the model's parameters in their own order, and fp32 copies, where there are any, have to agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.errors import CheckpointError
from torsh_distributed.migrate.deepspeed.checkpoints.zero_shards import (
    STEP,
    NamedState,
    Shapes,
    scalar_step,
    whole_tensor,
)
from torsh_distributed.migrate.foreign_state import PiecedTensor, load_safely

_MASTER = "fp32"


def from_plain_optimizer(optimizer: Mapping[str, Any], params: Mapping[str, Tensor], where: Path) -> NamedState:
    """Stage 0: the optimizer's state dict, and the model's parameters in its order."""
    inner = optimizer.get("optimizer_state_dict", optimizer)
    groups, state = inner.get("param_groups"), inner.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        raise CheckpointError(f"{where.name} has an optimizer that is not torch's", hint="load the weights alone")
    masters = _masters(optimizer, groups)
    names = _names_by_order(groups, state, masters, params, where)
    found = NamedState(loss_scaler=optimizer)
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        found.groups.append({**settings, "params": [names[number] for number in group["params"] if number in names]})
        for number in group["params"]:
            kept = state.get(number, {})
            if number not in names:
                continue
            if number in masters:
                found.weights[names[number]] = whole_tensor(masters[number].reshape(params[names[number]].shape))
            entries = {key: whole_tensor(value) for key, value in kept.items() if _has_dims(value)}
            step = kept.get(STEP, settings.get(STEP))
            if entries:
                found.moments[names[number]] = {**entries, **({} if step is None else {STEP: scalar_step(step)})}
    return found


def _masters(optimizer: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[int, Tensor]:
    """fp32 copies of 16-bit parameters, by number."""
    held = optimizer.get("fp32_groups")
    if not isinstance(held, list) or len(held) != len(groups):
        return {}
    found: dict[int, Tensor] = {}
    for group, copies in zip(groups, held, strict=True):
        found.update(zip(group["params"], copies, strict=False))
    return found


def _names_by_order(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[int, Mapping[str, Any]],
    masters: Mapping[int, Tensor],
    params: Mapping[str, Tensor],
    where: Path,
) -> dict[int, str]:
    """Number to name. Raises CheckpointError if the order leaves a choice."""
    waiting = [list(group["params"]) for group in groups]
    found: dict[int, str] = {}
    seen: set[int] = set()
    for name, param in params.items():
        if param.data_ptr() in seen and param.numel():
            continue  # a further name of a shared tensor
        seen.add(param.data_ptr())
        fitting = [queue for queue in waiting if queue and _fits(queue[0], param, state, masters)]
        if len(fitting) > 1:
            raise CheckpointError(
                f"{where.name}: the optimizer's state has no names, and {name} fits several of its groups",
                hint="load the weights alone, or save with ZeRO stage 1, which keeps names",
            )
        if fitting:
            found[fitting[0].pop(0)] = name
    left = sum(len(queue) for queue in waiting)
    if left:
        raise CheckpointError(
            f"{where.name}: the optimizer's state has no names, and {left} of its parameters are not in the model's"
            " order",
            hint="load the weights alone, or save with ZeRO stage 1, which keeps names",
        )
    return found


def _fits(number: int, param: Tensor, state: Mapping[int, Mapping[str, Any]], masters: Mapping[int, Tensor]) -> bool:
    if number in masters:
        master = masters[number]
        return master.shape == param.shape and torch.equal(master.detach().to(param.dtype), param.detach())
    kept = [value for value in state.get(number, {}).values() if _has_dims(value)]
    return all(value.shape == param.shape for value in kept)


def from_universal(directory: Path, groups: Sequence[Shapes], where: Path, *, inert: Sequence[str] = ()) -> NamedState:
    """A universal checkpoint: one folder for each parameter, one file for each part of its state."""
    found = NamedState()
    shapes = {name: shape for group in groups for name, shape in group.items()}
    common = directory / "optimizer_state.pt"
    shared = load_safely(common, inert=inert) if common.is_file() else {}
    shared = shared if isinstance(shared, Mapping) else {}
    found.loss_scaler = shared.get("loss_scaler")
    common_step = _common_step(shared)
    found.groups = _common_groups(shared, [list(group) for group in groups])
    for folder in sorted(path.parent for path in directory.rglob(f"{_MASTER}.pt")):
        name = folder.relative_to(directory).as_posix()
        kept: dict[str, PiecedTensor] = {}
        for file in sorted(folder.glob("*.pt")):
            value = _param_in(load_safely(file, inert=inert))
            if file.stem == STEP:
                kept[STEP] = scalar_step(value)
                continue
            if not isinstance(value, Tensor):
                raise CheckpointError(f"{file} holds no tensor", hint="copy the universal checkpoint again")
            shape = tuple(shapes.get(name, value.shape))
            if value.numel() != torch.Size(shape).numel():
                raise CheckpointError(
                    f"{where.name}: {name} has {value.numel()} elements in {file.name}, and in the model the"
                    f" shape {shape}",
                    hint="the files are of different saves: convert the checkpoint again",
                )
            pieced = PiecedTensor(shape, torch.float32, partial(_as_float, value, shape))
            if file.stem == _MASTER:
                found.weights[name] = pieced
            else:
                kept[file.stem] = pieced
        if kept and common_step is not None:
            kept.setdefault(STEP, scalar_step(common_step))
        if kept:
            found.moments[name] = kept
    missing = [name for name in shapes if name not in found.weights]
    if missing:
        raise CheckpointError(
            f"{where.name} lacks zero/{missing[0]}/{_MASTER}.pt",
            hint="convert the checkpoint again with DeepSpeed's ds_to_universal.py",
        )
    return found


def _common_groups(shared: Mapping[str, Any], group_names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """The optimizer's groups, whose settings are in one file beside the parameters' folders."""
    groups = shared.get("param_groups")
    if not isinstance(groups, list):
        return [{"params": list(names)} for names in group_names]
    found = []
    for number, group in enumerate(groups):
        # Stage 3 divides a large group into several buffers, whose numbers the group lists.
        parts = group.get("params", [number]) if len(groups) != len(group_names) else [number]
        held = [name for part in parts if part < len(group_names) for name in group_names[part]]
        found.append({**{key: value for key, value in group.items() if key != "params"}, "params": held})
    return found


def _common_step(shared: Mapping[str, Any]) -> Any:
    """The number of updates, where the parameters' folders do not have it: converted from stage 3."""
    inner = shared.get("optimizer_state_dict")
    state = inner.get("state") if isinstance(inner, Mapping) else None
    steps = [one[STEP] for one in (state or {}).values() if isinstance(one, Mapping) and STEP in one]
    return steps[0] if steps else None


def _has_dims(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _param_in(value: Any) -> Any:
    return value["param"] if isinstance(value, Mapping) and "param" in value else value


def _as_float(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    return value.detach().to(torch.float32).reshape(shape)
