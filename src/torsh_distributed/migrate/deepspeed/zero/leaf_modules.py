"""Leaf modules of stage 3: gathered as one piece, and every rank has a gradient of each of their parameters.

Which parts of such a module run depends on the data, as in mixtures of experts. A part that is a piece of its own would
be gathered and reduced on those ranks alone that run it; the others would meet another collective.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from torsh_distributed.migrate.deepspeed.surface.script_helpers import z3_leaf_module
from torsh_distributed.parallel.models.wrapping import WITHOUT_FORWARD, pieces_of
from torsh_distributed.parallel.torch_internals import tree_flatten, tree_unflatten
from torsh_distributed.plan.sections.data import FsdpConfig


def wrapping_of(model: nn.Module) -> dict[str, Any]:
    """Keys of a plan's section fsdp by which no piece is inside a leaf module; none if that is so anyway."""
    leaves = {name: module for name, module in model.named_modules() if z3_leaf_module(module)}
    pieces = pieces_of(model, FsdpConfig())
    inside = {name: leaf for name in pieces for leaf in leaves if name.startswith(f"{leaf}." if leaf else "")}
    if not inside:
        return {}
    whole = [leaf for leaf in dict.fromkeys(inside.values()) if leaf and not isinstance(leaves[leaf], WITHOUT_FORWARD)]
    names = [*(name for name in pieces if name not in inside), *(one for one in whole if one not in inside)]
    return {"wrap_names": names} if names else {"wrap": "none"}


def give_all_gradients(model: nn.Module) -> None:
    """From now on parameters of leaf modules that a forward left out have gradients of zeros; after sharding."""
    if not isinstance(model, FSDPModule):
        return
    for module in model.modules():
        if z3_leaf_module(module):
            # Registered after FSDP2's: it sees the parameters whole, which forward's end shards again.
            module.register_forward_pre_hook(_note_params)
            module.register_forward_hook(_touch_params)


def _note_params(module: nn.Module, _: object) -> None:
    module.__dict__["_torsh_whole"] = [param for param in module.parameters() if param.requires_grad]


def _touch_params(module: nn.Module, _: object, output: Any) -> Any:
    params = module.__dict__.pop("_torsh_whole")
    if not torch.is_grad_enabled() or not params:
        return output
    values, form = tree_flatten(output)
    places = [place for place, one in enumerate(values) if isinstance(one, Tensor) and one.requires_grad]
    if not places:
        return output
    touched: Any = _WithZeros.apply(len(places), *(values[place] for place in places), *params)  # type: ignore[no-untyped-call]  # untyped in torch
    for place, one in zip(places, touched, strict=True):
        values[place] = one
    return tree_unflatten(values, form)


class _WithZeros(torch.autograd.Function):
    """The outputs as they are; backward adds zeros to the parameters."""

    @staticmethod
    @override
    def forward(ctx: Any, num_outputs: int, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.zeros = [(one.shape, one.dtype, one.device) for one in given[num_outputs:]]
        ctx.set_materialize_grads(False)
        return tuple(one.view_as(one) for one in given[:num_outputs])

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.zeros]
        return None, *grads, *zeros
