"""Shards of stages 1, 2 and 3 as whole tensors: fp32 weights and the optimizer's state, by the names of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torsh_distributed.errors import CheckpointError
from torsh_distributed.migrate.foreign_state import PiecedTensor

Shapes = Mapping[str, Sequence[int]]


class FlatPiece(NamedTuple):
    """Elements `start` to `start + numel` of the flat buffer of data-parallel rank `rank`."""

    rank: int
    start: int
    numel: int


def pieces_by_group(shapes: Shapes, paddings: Sequence[int] | None, partition_numel: int) -> dict[str, list[FlatPiece]]:
    """Stages 1 and 2: the parameters of a group in one flat vector, cut into equal partitions, one for each rank.

    `paddings`: elements after each parameter that belong to none.
    """
    found: dict[str, list[FlatPiece]] = {}
    at = 0
    for number, (name, shape) in enumerate(shapes.items()):
        numel = math.prod(shape)
        found[name] = _cut(at, numel, partition_numel)
        at += numel + (paddings[number] if paddings else 0)
    return found


def pieces_by_param(shapes: Shapes, num_ranks: int) -> dict[str, list[FlatPiece]]:
    """Stage 3: each parameter cut into equal parts, one for each rank; a rank's parts of all parameters in a row."""
    found: dict[str, list[FlatPiece]] = {}
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = math.ceil(numel / num_ranks)
        held = [min(part, max(0, numel - rank * part)) for rank in range(num_ranks)]
        found[name] = [FlatPiece(rank, at, count) for rank, count in enumerate(held) if count]
        at += part
    return found


def put_together(shape: Sequence[int], pieces: Sequence[FlatPiece], flats: Sequence[Tensor], name: str) -> Tensor:
    """The whole tensor; a view of the file where it is one piece. Raises CheckpointError if a buffer is too short."""
    parts = []
    for piece in pieces:
        flat = flats[piece.rank]
        if piece.start + piece.numel > flat.numel():
            raise CheckpointError(
                f"the shard of data-parallel rank {piece.rank} ends before {name}: it has {flat.numel()} elements of"
                f" at least {piece.start + piece.numel}",
                hint="the files are of different saves, or one is damaged: copy the directory again",
            )
        parts.append(flat.narrow(0, piece.start, piece.numel))
    if not parts:
        return torch.empty(tuple(shape))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(tuple(shape))


def _cut(at: int, numel: int, partition_numel: int) -> list[FlatPiece]:
    found = []
    while numel > 0:
        rank, start = divmod(at, partition_numel)
        count = min(numel, partition_numel - start)
        found.append(FlatPiece(rank, start, count))
        at, numel = at + count, numel - count
    return found


STEP = "step"


@dataclass
class NamedState:
    """What a checkpoint holds, by the names of parameters; tensors are read when they are asked for."""

    weights: dict[str, PiecedTensor] = field(default_factory=dict)
    moments: dict[str, dict[str, PiecedTensor]] = field(default_factory=dict)
    """Of the optimizer: parameter to entry (`exp_avg`) to tensor."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's groups: settings, and under `params` the names."""
    loss_scaler: Any = None

    def join(self, other: NamedState) -> None:
        """Add what another model-parallel rank holds: other layers of a pipeline."""
        self.weights |= other.weights
        self.moments |= other.moments
        for number, group in enumerate(other.groups):
            if number < len(self.groups):
                names = self.groups[number]["params"]
                names += [name for name in group["params"] if name not in names]
            else:
                self.groups.append(group)


def whole_tensor(tensor: Tensor) -> PiecedTensor:
    """A tensor that is whole already; floating point as fp32."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return PiecedTensor(tuple(tensor.shape), dtype, lambda: tensor.detach().to(dtype))


def scalar_step(value: Any) -> PiecedTensor:
    """The number of updates, as torch's optimizers keep it."""
    return whole_tensor(torch.tensor(float(value)))


def from_shards(shards: Sequence[Mapping[str, Any]], shapes: Sequence[Shapes], where: Path) -> NamedState:
    """The state of one model-parallel rank from the optimizer files of its data-parallel ranks, in their order."""
    states = [_section(shard, where) for shard in shards]
    stage, counts = int(states[0]["zero_stage"]), states[0]["partition_count"]
    counts = counts if isinstance(counts, list) else [counts]
    if max(counts) != len(states):
        raise CheckpointError(
            f"{where.name} was saved by {max(counts)} data-parallel ranks, but has {len(states)} optimizer shards",
            hint="files of another save were left in the directory, or some were not copied",
        )
    if min(counts) != max(counts):
        raise CheckpointError(
            f"{where.name} has parameters sharded over {min(counts)} and over {max(counts)} ranks, as experts are",
            hint="convert it with DeepSpeed's ds_to_universal.py, and read the universal checkpoint",
        )
    found = _stage_3(states, shapes, where) if stage == 3 else _stage_2(states, shapes, where)
    found.loss_scaler = states[0].get("loss_scaler")
    return found


def _section(shard: Mapping[str, Any], where: Path) -> Mapping[str, Any]:
    state = shard.get("optimizer_state_dict") if isinstance(shard, Mapping) else None
    if not isinstance(state, Mapping) or "zero_stage" not in state or "partition_count" not in state:
        raise CheckpointError(f"{where.name} has an *_optim_states.pt that is not of ZeRO", hint="copy it again")
    return state


def _stage_2(states: Sequence[Mapping[str, Any]], shapes: Sequence[Shapes], where: Path) -> NamedState:
    flats = [_list_of(state, "single_partition_of_fp32_groups", where) for state in states]
    _require_groups(len(flats[0]), len(shapes), where)
    bases = [_base_state(state) for state in states]
    all_paddings = states[0].get("param_alignment_paddings")
    found = NamedState()
    settings = _settings(states[0], len(shapes))
    for number, names in enumerate(shapes):
        entries = [base.get(number, {}) for base in bases]
        weights = [flat[number].flatten() for flat in flats]
        first_lengths = [weights[0].numel(), *(one.numel() for one in entries[0].values() if _is_flat(one))]
        pieces = pieces_by_group(names, all_paddings[number] if all_paddings else None, max(1, *first_lengths))
        _add(found, names, pieces, weights, entries, settings[number])
        found.groups.append({**settings[number], "params": list(names)})
    return found


def _stage_3(states: Sequence[Mapping[str, Any]], shapes: Sequence[Shapes], where: Path) -> NamedState:
    flats = [_list_of(state, "fp32_flat_groups", where) for state in states]
    bases = [_base_state(state) for state in states]
    lengths = [flat.numel() for flat in flats[0]]
    parts = shapes if len(shapes) == len(lengths) else _split(shapes, lengths, len(states), where)
    inner = states[0].get("optimizer_state_dict") or {}
    groups: list[dict[str, Any]] = inner.get("param_groups") or [{"params": list(range(len(parts)))}]
    group_of = {number: group for group in groups for number in group.get("params", ())}
    found = NamedState()
    for number, names in enumerate(parts):
        entries = [base.get(number, {}) for base in bases]
        weights = [flat[number].flatten() for flat in flats]
        settings = _without_params(group_of.get(number, {}))
        _add(found, names, pieces_by_param(names, len(states)), weights, entries, settings)
    for group in groups:
        held = [name for number in group.get("params", ()) if number < len(parts) for name in parts[number]]
        found.groups.append({**_without_params(group), "params": held})
    return found


def _add(
    found: NamedState,
    names: Shapes,
    pieces: Mapping[str, list[FlatPiece]],
    weights: Sequence[Tensor],
    entries: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> None:
    """The parameters of one flat buffer, and what the optimizer keeps of each."""
    step = entries[0].get(STEP, settings.get(STEP))
    for name, shape in names.items():
        found.weights[name] = _pieced(shape, pieces[name], weights, name)
        kept = {
            entry: _pieced(shape, pieces[name], [one[entry].flatten() for one in entries], f"{name}'s {entry}")
            for entry, value in entries[0].items()
            if _is_flat(value)
        }
        if step is not None and kept:
            kept[STEP] = scalar_step(step)
        if kept:
            found.moments[name] = kept


def _pieced(shape: Sequence[int], pieces: Sequence[FlatPiece], flats: Sequence[Tensor], name: str) -> PiecedTensor:
    return PiecedTensor(tuple(shape), flats[0].dtype, partial(put_together, tuple(shape), pieces, flats, name))


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _base_state(state: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """What the base optimizer keeps, by flat buffer; files of elastic checkpoints have a plain list."""
    held = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    if isinstance(held, list):
        step = state.get("base_optimizer_state_step")
        return {number: {**one, **({} if step is None else {STEP: step})} for number, one in enumerate(held)}
    inside = held.get("state", {}) if isinstance(held, Mapping) else {}
    return {int(number): one for number, one in inside.items()}


def _settings(state: Mapping[str, Any], num_groups: int) -> list[dict[str, Any]]:
    held = state.get("base_optimizer_state")
    groups = held.get("param_groups") if isinstance(held, Mapping) else state.get("param_groups")
    groups = groups if isinstance(groups, list) and len(groups) == num_groups else [{}] * num_groups
    return [_without_params(group) for group in groups]


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _list_of(state: Mapping[str, Any], key: str, where: Path) -> list[Tensor]:
    found = state.get(key)
    if not isinstance(found, list) or not all(isinstance(one, Tensor) for one in found):
        raise CheckpointError(
            f"{where.name} has no {key}: its fp32 weights are not in the files",
            hint="state that was offloaded to NVMe, or a save without optimizer state, cannot be read",
        )
    return found


def _require_groups(num_flats: int, num_groups: int, where: Path) -> None:
    if num_flats != num_groups:
        raise CheckpointError(
            f"{where.name} has {num_groups} groups of parameters in its model file and {num_flats} in its shards",
            hint="the files are of different saves: copy the directory again",
        )


def _split(shapes: Sequence[Shapes], lengths: Sequence[int], num_ranks: int, where: Path) -> Sequence[Shapes]:
    """Parameters in a row, divided among flat buffers of these lengths: a buffer ends where a parameter does."""
    found: list[dict[str, Sequence[int]]] = [{} for _ in lengths]
    number, left = 0, lengths[0] if lengths else 0
    for group in shapes:
        for name, shape in group.items():
            part = math.ceil(math.prod(shape) / num_ranks)
            while left == 0 and number + 1 < len(lengths):
                number += 1
                left = lengths[number]
            if part > left:
                raise CheckpointError(
                    f"{where.name}: {name} does not end where its shard does",
                    hint="the files are of different saves: copy the directory again",
                )
            found[number][name] = shape
            left -= part
    return found
