"""State of a model spread over tensor and pipeline axes, as whole tensors by the model's own names; and back.

The same form that `whole_state` gives for replicas and shards: saved at one layout, loaded at any other.
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
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.expert.layer import MoELayer
from torsh_distributed.parallel.expert.stacked_experts import check_stacked, cut_stack, gather_stack
from torsh_distributed.parallel.state.whole_state import named_params, part_of, plain_name, whole
from torsh_distributed.parallel.tensor.cut import Cut

_DTYPES = {str(one): one for one in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)}


@dataclass(frozen=True)
class Spread:
    """Where the tensors of a model are."""

    model: nn.Module
    """The whole model; layers of other stages lie on the meta device."""
    cuts: Mapping[str, Cut]
    """Name to cut of parameters of which this rank holds a piece."""
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    owner: Callable[[str], int]
    """Name to the pipeline rank that has the tensor."""
    names: Mapping[str, str]
    """Another name of a shared parameter to its first one."""
    experts: Mapping[str, MoELayer]
    """Name to layer of stacks of which this rank holds its experts."""

    def joined(self, name: str, value: Tensor) -> Tensor:
        """All of a tensor of which ranks along tp or ep hold pieces; every rank of the axis calls this."""
        held = whole(value.detach())
        layer = self.experts.get(name)
        if layer is not None:
            return gather_stack(held, layer)
        cut = self.cuts.get(name)
        if cut is None or self.tp.size() == 1:
            return held
        return _gather(held, cut, self.tp)

    def part(self, name: str, value: Tensor, like: Tensor) -> Tensor:
        """What this rank keeps of a whole tensor."""
        layer = self.experts.get(name)
        if layer is not None:
            value = cut_stack(value, layer)
        cut = self.cuts.get(name)
        if cut is not None and self.tp.size() > 1:
            value = cut.part(value, rank=self.tp.rank(), size=self.tp.size())
        return part_of(value, like)


def model_state(spread: Spread) -> dict[str, Any]:
    """Whole tensors by name, equal on every rank, all of which call this."""
    out: dict[str, Any] = {}
    for raw, value in spread.model.state_dict().items():
        name = plain_name(raw)
        if not isinstance(value, Tensor):
            out[name] = value
            continue
        owner = spread.owner(name)
        mine = spread.joined(name, value) if owner == spread.pp.rank() else None
        out[name] = _from(owner, mine, spread.pp)
    return out


def load_model_state(spread: Spread, state: Mapping[str, Any]) -> None:
    """Take this rank's part of `model_state`; a name or shape that does not fit raises InvalidArgument."""
    held = spread.model.state_dict()
    own = {plain_name(name): name for name in held}
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unknown:
        raise InvalidArgument(
            "the state is not of this model: names differ",
            hint="build the model as it was when the state was made",
            missing=missing[:3] or None,
            unknown=unknown[:3] or None,
        )
    with torch.no_grad():
        for name, value in state.items():
            here = held[own[name]]
            if not isinstance(value, Tensor) or here.device.type == "meta":
                continue
            part = spread.part(name, value, here)
            if part.shape != here.shape:
                raise InvalidArgument(
                    f"the state is not of this model: {name} differs",
                    hint="build the model as it was when the state was made",
                    state=tuple(value.shape),
                )
            here.copy_(part)


def optimizer_state(spread: Spread, local: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by name, whole, in the order of the model; every rank calls this."""
    names = {id(param): spread.names.get(name, name) for name, param in named_params(local).items()}
    groups = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    order = [plain_name(name) for name, _ in spread.model.named_parameters()]
    everyone = all_gather_object(groups, group=spread.pp)
    merged = [
        sorted({name for mine in everyone for name in mine[index]}, key=order.index) for index in range(len(groups))
    ]
    state = {name: dict(values) for name, values in _states(spread, names, optimizer)}
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "state": {name: state[name] for group in merged for name in group if name in state},
        "param_groups": [{**one, "params": group} for one, group in zip(kept, merged, strict=True)],
    }


def _states(
    spread: Spread, names: Mapping[int, str], optimizer: Optimizer
) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Each parameter's values, from the first pipeline rank that has them to all."""
    mine: dict[str, dict[str, Any]] = {}
    for param, values in optimizer.state.items():
        name = names[id(param)]
        if name in spread.experts:
            check_stacked(param, optimizer)
        mine[name] = {
            key: spread.joined(name, value) if isinstance(value, Tensor) and value.dim() else value
            for key, value in values.items()
        }
    plain = {name: {key: _describe(value) for key, value in values.items()} for name, values in mine.items()}
    found: set[str] = set()
    for owner, theirs in enumerate(all_gather_object(plain, group=spread.pp)):
        for name, described in theirs.items():
            if name in found:
                continue
            found.add(name)
            yield (
                name,
                [
                    (key, _from(owner, mine[name][key] if owner == spread.pp.rank() else None, spread.pp))
                    if isinstance(text, list)
                    else (key, text)
                    for key, text in described.items()
                ],
            )


def load_optimizer_state(spread: Spread, local: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Take this rank's part of `optimizer_state`; the groups must be those of the state."""
    params = named_params(local)
    names = {id(param): spread.names.get(name, name) for name, param in params.items()}
    theirs = [list(group["params"]) for group in state["param_groups"]]
    mine = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    if len(mine) != len(theirs) or any(set(one) - set(other) for one, other in zip(mine, theirs, strict=True)):
        raise InvalidArgument(
            "the state is of an optimizer with other parameters or groups",
            hint="build the optimizer as it was when the state was made",
            groups=[len(group) for group in mine],
            state_groups=[len(group) for group in theirs],
        )
    flat = [param for group in optimizer.param_groups for param in group["params"]]
    values = {
        index: {
            key: spread.part(names[id(param)], value, param) if isinstance(value, Tensor) and value.dim() else value
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


def _gather(held: Tensor, cut: Cut, group: dist.ProcessGroup) -> Tensor:
    """Pieces of all ranks along an axis, joined; they differ in length, so shapes travel first."""
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
