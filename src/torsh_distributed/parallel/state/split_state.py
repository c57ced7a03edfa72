"""State of a model split over tensor, pipeline and expert axes, as whole tensors by the model's own names.

The same form that `whole_state` gives for replicas and shards: saved under one layout, it loads under any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.parallel.expert.layer import MoELayer
from torsh_distributed.parallel.expert.stacked_experts import check_stacked, cut_stack, gather_stack
from torsh_distributed.parallel.state.whole_state import (
    named_params,
    other_groups,
    part_of,
    plain_name,
    require_same_names,
    require_same_shape,
    whole,
)
from torsh_distributed.parallel.tensor.cut import TensorCut

_DTYPES = {str(one): one for one in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)}


@dataclass(frozen=True)
class ModelSplit:
    """How the tensors of a model are split over ranks."""

    model: nn.Module
    """The whole model; layers of other stages are on the meta device."""
    cuts: Mapping[str, TensorCut]
    """Name to cut, for parameters of which this rank holds a piece."""
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    owner: Callable[[str], int]
    """Name to the pipeline rank that has the tensor."""
    names: Mapping[str, str]
    """Another name of a shared parameter to its first one."""
    experts: Mapping[str, MoELayer]
    """Name to layer, for stacks of which this rank holds its experts."""

    def joined(self, name: str, value: Tensor) -> Tensor:
        """The whole of a tensor of which ranks along tp or ep hold pieces; every rank of the axis calls this."""
        held = whole(value.detach())
        layer = self.experts.get(name)
        if layer is not None:
            return gather_stack(held, layer)
        cut = self.cuts.get(name)
        if cut is None or self.tp.size() == 1:
            return held
        return _gather(held, cut, self.tp)

    def part(self, name: str, value: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        layer = self.experts.get(name)
        if layer is not None:
            value = cut_stack(value, layer)
        cut = self.cuts.get(name)
        if cut is not None and self.tp.size() > 1:
            value = cut.part(value, rank=self.tp.rank(), size=self.tp.size())
        return part_of(value, like)


def model_state(split: ModelSplit) -> dict[str, Any]:
    """Whole tensors by name, equal on every rank; all ranks call this."""
    out: dict[str, Any] = {}
    for raw, value in split.model.state_dict().items():
        name = plain_name(raw)
        if not isinstance(value, Tensor):
            out[name] = value
            continue
        owner = split.owner(name)
        mine = split.joined(name, value) if owner == split.pp.rank() else None
        out[name] = _from(owner, mine, split.pp)
    return out


def load_model_state(split: ModelSplit, state: Mapping[str, Any]) -> None:
    """Load this rank's part of `model_state`; a name or shape that does not fit raises InvalidArgument."""
    held = split.model.state_dict()
    own = require_same_names(held, state)
    with torch.no_grad():
        for name, value in state.items():
            here = held[own[name]]
            if not isinstance(value, Tensor) or here.device.type == "meta":
                continue
            part = split.part(name, value, here)
            require_same_shape(name, part, here)
            here.copy_(part)


def optimizer_state(split: ModelSplit, local: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by name, whole, in the order of the model; every rank calls this."""
    names = {id(param): split.names.get(name, name) for name, param in named_params(local).items()}
    groups = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    order = [plain_name(name) for name, _ in split.model.named_parameters()]
    everyone = all_gather_object(groups, group=split.pp)
    merged = [
        sorted({name for mine in everyone for name in mine[index]}, key=order.index) for index in range(len(groups))
    ]
    state = {name: dict(values) for name, values in _states(split, names, optimizer)}
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "state": {name: state[name] for group in merged for name in group if name in state},
        "param_groups": [{**one, "params": group} for one, group in zip(kept, merged, strict=True)],
    }


def _states(
    split: ModelSplit, names: Mapping[int, str], optimizer: Optimizer
) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Each parameter's values on all ranks, sent by the first pipeline rank that has them."""
    mine: dict[str, dict[str, Any]] = {}
    for param, values in optimizer.state.items():
        name = names[id(param)]
        if name in split.experts:
            check_stacked(param, optimizer)
        mine[name] = {
            key: split.joined(name, value) if isinstance(value, Tensor) and value.dim() else value
            for key, value in values.items()
        }
    plain = {name: {key: _describe(value) for key, value in values.items()} for name, values in mine.items()}
    found: set[str] = set()
    for owner, theirs in enumerate(all_gather_object(plain, group=split.pp)):
        for name, described in theirs.items():
            if name in found:
                continue
            found.add(name)
            yield (
                name,
                [
                    (key, _from(owner, mine[name][key] if owner == split.pp.rank() else None, split.pp))
                    if isinstance(text, list)
                    else (key, text)
                    for key, text in described.items()
                ],
            )


def load_optimizer_state(split: ModelSplit, local: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load this rank's part of `optimizer_state`; the groups must be those of the state."""
    params = named_params(local)
    names = {id(param): split.names.get(name, name) for name, param in params.items()}
    theirs = [list(group["params"]) for group in state["param_groups"]]
    mine = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    if len(mine) != len(theirs) or any(set(one) - set(other) for one, other in zip(mine, theirs, strict=True)):
        raise other_groups(mine, theirs)
    flat = [param for group in optimizer.param_groups for param in group["params"]]
    values = {
        index: {
            key: split.part(names[id(param)], value, param) if isinstance(value, Tensor) and value.dim() else value
            for key, value in state["state"][names[id(param)]].items()
        }
        for index, param in enumerate(flat)
        if names[id(param)] in state["state"]
    }
    places = {id(param): index for index, param in enumerate(flat)}
    groups = [
        {
            **{key: value for key, value in given.items() if key != "params"},
            "params": [places[id(param)] for param in group["params"]],
        }
        for given, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def _describe(value: Any) -> Any:
    return ["tensor"] if isinstance(value, Tensor) else value


def _gather(held: Tensor, cut: TensorCut, group: dist.ProcessGroup) -> Tensor:
    """Pieces of all ranks along an axis, joined; their lengths differ, so shapes are exchanged first."""
    shapes = all_gather_object(list(held.shape), group=group)
    longest = max(shape[cut.dim] for shape in shapes)
    padded = held.new_zeros([*held.shape[: cut.dim], longest, *held.shape[cut.dim + 1 :]])
    padded.narrow(cut.dim, 0, held.shape[cut.dim]).copy_(held)
    received = [torch.empty_like(padded) for _ in shapes]
    dist.all_gather(received, padded, group=group)
    parts = [one.narrow(cut.dim, 0, shape[cut.dim]) for one, shape in zip(received, shapes, strict=True)]
    return cut.join(parts)


def _from(owner: int, value: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """The owner's tensor on every rank of the group."""
    if group.size() == 1:
        assert value is not None, "the only rank has everything"
        return value
    header = None if value is None else [list(value.shape), str(value.dtype), str(value.device.type)]
    shape, dtype, device = all_gather_object(header, group=group)[owner]
    held = torch.empty(shape, dtype=_DTYPES[dtype], device=device) if value is None else value.contiguous()
    dist.broadcast(held, group=group, group_src=owner)
    return held
