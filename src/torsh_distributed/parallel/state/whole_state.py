"""State of model and optimizer as whole tensors by parameter name, for every strategy and world size.

Sharded tensors are gathered when saved and sharded again when loaded. Names survive wrapping, parameter indices do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_distributed.errors import InvalidArgument

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and torch.compile add to names."""


def plain_name(name: str) -> str:
    """A parameter's name in the model without wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters by plain name; a shared one under its first name."""
    return {plain_name(name): param for name, param in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or a sharded one gathered; then every rank of its mesh calls this."""
    from torch.distributed.tensor import DTensor  # takes a second to import, which data-parallel jobs need not spend

    if isinstance(tensor, DTensor):
        gathered: Tensor = tensor.full_tensor()
        return gathered
    return tensor


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole `value`, equal on all ranks, sharded like `like`."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value
    # src_data_rank=None: every rank takes its own part; nothing is sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def model_state(model: nn.Module) -> dict[str, Any]:
    """`model.state_dict()` with plain names and whole tensors."""
    return {
        plain_name(name): whole(value.detach()) if isinstance(value, Tensor) else value
        for name, value in model.state_dict().items()
    }


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what `model_state` returned, every key; a name or shape that does not fit raises InvalidArgument."""
    held = model.state_dict()
    own = require_same_names(held, state)
    for name, value in state.items():
        here = held[own[name]]
        if isinstance(value, Tensor):
            require_same_shape(name, value, here)
    cut = {
        own[name]: part_of(value, held[own[name]]) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
    model.load_state_dict(cut)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with names in place of indices and whole tensors."""
    names = {id(param): name for name, param in named_params(model).items()}
    groups, state = [], {}
    for group in optimizer.param_groups:
        kept = {key: value for key, value in group.items() if key != "params"}
        groups.append({**kept, "params": [names[id(param)] for param in group["params"]]})
        for param in group["params"]:
            if param in optimizer.state:
                state[names[id(param)]] = {key: _whole_value(value) for key, value in optimizer.state[param].items()}
    return {"state": state, "param_groups": groups}


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `optimizer_state` returned; the groups must hold the same parameters in the same order."""
    params = named_params(model)
    names = {id(param): name for name, param in params.items()}
    mine = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    theirs = [list(group["params"]) for group in state["param_groups"]]
    if mine != theirs:
        raise other_groups(mine, theirs)
    index = {name: number for number, name in enumerate(name for group in mine for name in group)}
    optimizer.load_state_dict(
        {
            "state": {index[name]: carried(values, params[name]) for name, values in state["state"].items()},
            "param_groups": [
                {**group, "params": [index[name] for name in group["params"]]} for group in state["param_groups"]
            ],
        }
    )


def require_same_names(held: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, str]:
    """Plain name to name in the model's own state; InvalidArgument unless the names of `state` are just those."""
    own = {plain_name(name): name for name in held}
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unknown:
        raise InvalidArgument(
            "the state is not of this model: names differ",
            hint="build the model as it was when the state was made",
            missing=missing[:3] or None,
            unknown=unknown[:3] or None,
        )
    return own


def require_same_shape(name: str, value: Tensor, held: Tensor) -> None:
    """Raise InvalidArgument unless a tensor of the state has the shape of the one it replaces."""
    if value.shape != held.shape:
        raise InvalidArgument(
            f"the state is not of this model: {name} differs",
            hint="build the model as it was when the state was made",
            state=tuple(value.shape),
            model=tuple(held.shape),
        )


def other_groups(mine: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> InvalidArgument:
    """The error for the state of an optimizer whose groups hold other parameters."""
    return InvalidArgument(
        "the state is of an optimizer with other parameters or groups",
        hint="build the optimizer as it was when the state was made",
        groups=[len(group) for group in mine],
        state_groups=[len(group) for group in theirs],
    )


def carried(values: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """The optimizer's values for a parameter, sharded like the parameter."""
    return {key: part_of(value, param) if isinstance(value, Tensor) else value for key, value in values.items()}


def _whole_value(value: Any) -> Any:
    return whole(value.detach()) if isinstance(value, torch.Tensor) else value
