"""Parameters that a module uses without having them: gathered for its forward, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

_ATTRIBUTE = "_external_params"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say, before `initialize`, that `module` uses a parameter of another one."""
    module.__dict__.setdefault(_ATTRIBUTE, []).append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take it back."""
    known = module.__dict__.get(_ATTRIBUTE, [])
    known[:] = [one for one in known if one is not parameter]


def external_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """By module, the modules that have the parameters it registered; before the model is sharded."""
    owners = {
        id(param): name
        for name, module in model.named_modules()
        for param in module._parameters.values()
        if param is not None
    }
    return {
        module: [owners[id(param)] for param in module.__dict__[_ATTRIBUTE] if id(param) in owners]
        for module in model.modules()
        if module.__dict__.get(_ATTRIBUTE)
    }


def gather_external(model: nn.Module, externals: dict[nn.Module, list[str]]) -> None:
    """From now on these modules find the parameters whole in their forward; after the model is sharded."""
    for module, names in externals.items():
        for name in names:
            piece = _piece_of(model, name)
            if piece is not None:
                module.register_forward_pre_hook(_unshard(piece))


def _piece_of(model: nn.Module, name: str) -> FSDPModule | None:
    """What is gathered together with a module: the nearest sharded one around it."""
    while True:
        found = model.get_submodule(name)
        if isinstance(found, FSDPModule):
            return found
        if not name:
            return None
        name = name.rpartition(".")[0]


def _unshard(piece: FSDPModule) -> Callable[..., Any]:
    def gather(*_: object) -> None:
        piece.unshard()

    return gather
