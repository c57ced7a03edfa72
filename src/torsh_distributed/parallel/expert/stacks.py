"""Stacks of expert tensors (experts of this rank first): gathered whole, cut to size, moved to another placement.

A whole stack has one entry for each expert of the layer, by its index: it does not depend on the number of ranks or on
where experts live, and is what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_distributed.comm.collectives.moves import all_gather, all_to_all_single
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.expert.balancing.placement import Placement
from torsh_distributed.parallel.expert.layer import MoELayer, moe_layers
from torsh_distributed.parallel.state.whole_state import plain_name


def spread_params(model: nn.Module) -> dict[str, tuple[MoELayer, nn.Parameter]]:
    """The parameters that hold a part of a layer's experts, by plain name; those of layers spread over ranks only."""
    return {
        plain_name(f"{layer_name}.experts.{name}" if layer_name else f"experts.{name}"): (layer, param)
        for layer_name, layer in moe_layers(model).items()
        if layer.group is not None
        for name, param in layer.experts.stacked().items()
    }


def gather_stack(stack: Tensor, layer: MoELayer) -> Tensor:
    """All experts of the layer, by index; every rank of its group calls this."""
    assert layer.group is not None
    by_slot = torch.cat(all_gather(stack.detach(), group=layer.group))
    return by_slot[list(layer.placement.slot_of_expert)]


def cut_stack(whole: Tensor, layer: MoELayer) -> Tensor:
    """This rank's experts out of all of them; nothing travels."""
    if whole.dim() == 0 or len(whole) != layer.config.num_experts:
        raise InvalidArgument(
            "the state is not of this layer: the number of experts differs",
            hint="build the model with the number of experts it had when the state was made",
            state=tuple(whole.shape),
            num_experts=layer.config.num_experts,
        )
    return whole[list(layer.placement.experts_of(layer.ep_rank))]


def move_stack(stack: Tensor, old: Placement, new: Placement, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """This rank's stack under the new placement, bit for bit, and how many of its entries left this rank."""
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


def stacked_state(layer: MoELayer, param: nn.Parameter, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """What the optimizer keeps for a stack that has an entry for each expert; numbers for the whole of it are left out.

    Raises InvalidArgument for a tensor that is neither: it could not be moved or kept.
    """
    check_stacked(param, optimizer)
    for key, value in optimizer.state.get(param, {}).items():
        if isinstance(value, Tensor) and value.dim():
            yield key, value


def check_stacked(param: Tensor, optimizer: Optimizer) -> None:
    """Raise InvalidArgument if the optimizer keeps a tensor for a stack that does not say which part is whose."""
    for key, value in optimizer.state.get(param, {}).items():
        if isinstance(value, Tensor) and value.dim() and value.shape[0] != param.shape[0]:
            raise InvalidArgument(
                f"{type(optimizer).__name__} keeps {key} in a shape that does not say which part is whose expert",
                hint="use an optimizer whose state has the shape of the parameter, such as AdamW",
                shape=tuple(value.shape),
                num_experts_here=param.shape[0],
            )


def gather_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """`state` of model and optimizer by name, with whole stacks in place of this rank's; every rank calls this."""
    tensors, kept = dict(state["model"]), dict(state["optimizer"]["state"])
    for name, (layer, param) in spread_params(model).items():
        tensors[name] = gather_stack(param, layer)
        if name in kept:
            stacked = {key: gather_stack(value, layer) for key, value in stacked_state(layer, param, optimizer)}
            kept[name] = {**kept[name], **stacked}
    return {**state, "model": tensors, "optimizer": {**state["optimizer"], "state": kept}}


def cut_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """What `gather_state` gave, with this rank's part of each stack."""
    tensors, kept = dict(state["model"]), dict(state["optimizer"]["state"])
    for name, (layer, _) in spread_params(model).items():
        if name in tensors:
            tensors[name] = cut_stack(tensors[name], layer)
        if name in kept:
            kept[name] = {
                key: cut_stack(value, layer) if isinstance(value, Tensor) and value.dim() else value
                for key, value in kept[name].items()
            }
    return {**state, "model": tensors, "optimizer": {**state["optimizer"], "state": kept}}
