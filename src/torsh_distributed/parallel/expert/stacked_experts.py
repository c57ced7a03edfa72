"""Stacked expert tensors (dim 0: this rank's experts): gather all experts, cut to this rank's, move between ranks.

A whole stack has one entry for each expert of the layer, by index: it does not depend on the number of ranks or on the
placement, and is what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.comm.collectives.moves import all_gather, all_to_all_single
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.expert.balancing.placement import Placement
from torsh_distributed.parallel.expert.layer import MoELayer, moe_layers
from torsh_distributed.parallel.expert.placed_experts import PlacedExperts, placed_experts
from torsh_distributed.parallel.state.held_tensors import DimRun
from torsh_distributed.parallel.state.whole_state import StateParts, plain_name

ExpertOwner = MoELayer | PlacedExperts
"""What knows where its experts are."""


def spread_params(model: nn.Module) -> dict[str, tuple[ExpertOwner, nn.Parameter]]:
    """The parameters that hold this rank's part of a layer's experts, by plain name; only of layers that are spread."""
    ours = {f"{name}.experts" if name else "experts": layer for name, layer in moe_layers(model).items()}
    owners: dict[str, tuple[ExpertOwner, dict[str, nn.Parameter]]] = {
        **{name: (layer, layer.experts.stacked()) for name, layer in ours.items()},
        **{name: (placed, placed.stacked()) for name, placed in placed_experts(model).items()},
    }
    return {
        plain_name(f"{where}.{name}" if where else name): (owner, param)
        for where, (owner, stacks) in owners.items()
        if owner.group is not None
        for name, param in stacks.items()
    }


def gather_stack(stack: Tensor, layer: ExpertOwner) -> Tensor:
    """The whole stack, by expert index; every rank of the layer's group calls this."""
    assert layer.group is not None
    by_slot = torch.cat(all_gather(stack.detach(), group=layer.group))
    return by_slot[list(layer.placement.slot_of_expert)]


def cut_stack(whole: Tensor, layer: ExpertOwner) -> Tensor:
    """This rank's experts of a whole stack; no communication."""
    if whole.dim() == 0 or len(whole) != layer.num_experts:
        raise InvalidArgument(
            "the state does not belong to this layer: the number of experts differs",
            hint="build the model with the number of experts it had when the state was saved",
            state=tuple(whole.shape),
            num_experts=layer.num_experts,
        )
    return whole[list(layer.placement.experts_of(layer.ep_rank))]


def expert_runs(layer: ExpertOwner) -> list[DimRun]:
    """Where this rank's experts are in the whole stack: runs of neighbouring experts."""
    runs: list[DimRun] = []
    for place, expert in enumerate(layer.placement.experts_of(layer.ep_rank)):
        if runs and runs[-1].whole + runs[-1].length == expert:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + 1)
        else:
            runs.append(DimRun(expert, place, 1))
    return runs


class SpreadExperts(StateParts):
    """Replicas, except for stacks of experts, of which this rank holds its own."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = {name: layer for name, (layer, _) in spread_params(model).items()}

    @override
    def runs(self, name: str, shape: Sequence[int]) -> tuple[list[int], list[list[DimRun]]]:
        whole_shape, runs = super().runs(name, shape)
        layer = self._layers.get(name)
        if shape and layer is not None:
            whole_shape[0], runs[0] = layer.num_experts, expert_runs(layer)
        return whole_shape, runs

    @override
    def part(self, name: str, value: Tensor, like: Tensor) -> Tensor:
        layer = self._layers.get(name)
        # A count of steps belongs to the whole stack; what has the shape of a part was cut by `cut_state`.
        if layer is None or not value.dim() or value.shape == like.shape:
            return value
        return cut_stack(value, layer)

    @override
    def check(self, name: str, param: Tensor, optimizer: Optimizer) -> None:
        if name in self._layers:
            check_stacked(param, optimizer)


def move_stack(stack: Tensor, old: Placement, new: Placement, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """This rank's stack under the new placement, bit for bit, and how many experts left this rank."""
    me = group.rank()
    before, after = old.experts_of(me), new.experts_of(me)
    leaving = [[expert for expert in new.experts_of(rank) if expert in before] for rank in range(new.num_ranks)]
    arriving = [[expert for expert in after if expert in old.experts_of(rank)] for rank in range(old.num_ranks)]
    order = [before.index(expert) for experts in leaving for expert in experts]
    received = all_to_all_single(
        stack[order].reshape(len(order), -1), [len(one) for one in leaving], [len(one) for one in arriving], group=group
    )
    came = [expert for experts in arriving for expert in experts]
    moved = received[[came.index(expert) for expert in after]].view(len(after), *stack.shape[1:])
    return moved, len(before) - len(leaving[me])


def stacked_state(layer: ExpertOwner, param: nn.Parameter, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's tensors for a stack that have an entry for each expert; scalars for the whole stack are left out.

    Raises InvalidArgument for any other tensor: it could not be moved or saved.
    """
    check_stacked(param, optimizer)
    for key, value in optimizer.state.get(param, {}).items():
        if isinstance(value, Tensor) and value.dim():
            yield key, value


def check_stacked(param: Tensor, optimizer: Optimizer) -> None:
    """Raise InvalidArgument if the optimizer keeps a tensor for a stack that has no entry for each expert."""
    for key, value in optimizer.state.get(param, {}).items():
        if isinstance(value, Tensor) and value.dim() and value.shape[0] != param.shape[0]:
            raise InvalidArgument(
                f"{type(optimizer).__name__} keeps {key} in a shape without an entry for each expert",
                hint="use an optimizer whose state has the shape of the parameter, such as AdamW",
                shape=tuple(value.shape),
                num_experts_here=param.shape[0],
            )


def gather_state(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any], *, whole: Container[str] = ()
) -> dict[str, Any]:
    """`state` of model and optimizer by name, with whole stacks instead of this rank's; every rank calls this.

    The optimizer's state of the parameters in `whole` is whole already.
    """
    tensors, kept = dict(state["model"]), dict(state["optimizer"]["state"])
    for name, (layer, param) in spread_params(model).items():
        tensors[name] = gather_stack(param, layer)
        if name in kept and name not in whole:
            stacked = {key: gather_stack(value, layer) for key, value in stacked_state(layer, param, optimizer)}
            kept[name] = {**kept[name], **stacked}
    return {**state, "model": tensors, "optimizer": {**state["optimizer"], "state": kept}}


def cut_state(model: nn.Module, state: Mapping[str, Any], *, whole: Container[str] = ()) -> dict[str, Any]:
    """The result of `gather_state` with each stack cut to this rank's experts."""
    tensors, kept = dict(state["model"]), dict(state["optimizer"]["state"])
    for name, (layer, _) in spread_params(model).items():
        if name in tensors:
            tensors[name] = cut_stack(tensors[name], layer)
        if name in kept and name not in whole:
            kept[name] = {
                key: cut_stack(value, layer) if isinstance(value, Tensor) and value.dim() else value
                for key, value in kept[name].items()
            }
    return {**state, "model": tensors, "optimizer": {**state["optimizer"], "state": kept}}
