"""What scripts find on a model of stage 3 while a part of it is whole, and on its optimizer.

In a forward the modules have whole parameters in the place of shards. A script that asks there for `ds_status`, as
TRL's fused losses do before they gather a head, gets that of a whole one. Scripts that generate inside
GatheredParameters take DeepSpeed's hooks off the model first and put them on again; here there are none.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from torsh_distributed.migrate.deepspeed.zero.gathered_parameters import external_parameters
from torsh_distributed.migrate.deepspeed.zero.param_access import mark_whole, note_whole
from torsh_distributed.train.engine import Engine


class ParameterOffload:
    """What `engine.optimizer.parameter_offload` is: the module, and no hooks to remove. Layers gather themselves."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[RemovableHandle] = []
        self.backward_hooks: list[RemovableHandle] = []

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Nothing was taken off."""


def give_marks(core: Engine) -> None:
    """From now on scripts find them; after the model is sharded under stage 3."""
    core.optimizer.parameter_offload = ParameterOffload(core.unwrapped)  # type: ignore[attr-defined]  # DeepSpeed's
    for module in core.unwrapped.modules():
        module.ds_external_parameters = _externals_of(module)  # type: ignore[assignment]  # DeepSpeed's method
        if isinstance(module, FSDPModule):
            _mark_in_first_forward(module)


def _externals_of(module: nn.Module) -> Callable[[], ItemsView[int, nn.Parameter]]:
    def found() -> ItemsView[int, nn.Parameter]:
        """The parameters of other modules that this one uses."""
        return {id(param): param for param in external_parameters(module)}.items()

    return found


def _mark_in_first_forward(piece: nn.Module) -> None:
    """The whole parameters of a piece are the same objects in every forward, made in the first one."""
    shards = {name: param for name, param in piece.named_parameters() if hasattr(param, "ds_id")}

    def mark(module: nn.Module, inputs: Any) -> None:
        # Registered after FSDP2's hook, so what belongs to this piece is whole; inner pieces are not yet.
        for name, param in module.named_parameters():
            if name in shards and not hasattr(param, "to_local"):
                mark_whole(param, shards[name])
                note_whole(param, shards[name])
        handle.remove()

    handle = piece.register_forward_pre_hook(mark)
