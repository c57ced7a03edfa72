"""Under stage 2 every rank has whole parameters between updates, as scripts for that stage expect.

DeepSpeed shards gradients and the optimizer's state there, and gathers parameters at the end of a step. FSDP2 would
gather them in the next forward. Gathering at once moves no more bytes, and a rank may read parameters, or save
`engine.module.state_dict()`, without the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from torsh_distributed.migrate.deepspeed.moe.expert_modules import as_listed, stacks_of
from torsh_distributed.migrate.deepspeed.zero.param_access import note_whole
from torsh_distributed.parallel.state.whole_state import plain_name, whole
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.train.engine import Engine


def whole_weights(strategy: Strategy, *, keeps: bool, exclude: set[str] = frozenset()) -> dict[str, Tensor]:  # type: ignore[assignment]  # an empty set
    """The model's state with whole tensors in host memory, where `keeps`; every rank calls this.

    One tensor at a time is whole on the other ranks.
    """
    found: dict[str, Tensor] = {}
    wanted = ((name, value) for name, value in strategy.whole_tensors() if name not in exclude)
    for name, value in as_listed(wanted, stacks_of(strategy.unwrapped)):
        if keeps and isinstance(value, Tensor):
            found[name] = value.detach().to("cpu", copy=True)
    return found


def frozen_names(module: nn.Module) -> set[str]:
    """The parameters that are not trained."""
    return {plain_name(name) for name, param in module.named_parameters() if not param.requires_grad}


class WholeBetweenSteps:
    """Keeps an engine's module gathered, from the start and after every update; every rank makes the same calls."""

    def __init__(self, core: Engine) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._core = core
        module = core.unwrapped
        self._pieces: list[Any] = [one for one in module.modules() if isinstance(one, FSDPModule)]
        self._is_held = False
        for piece in self._pieces:
            state = piece._get_fsdp_state()
            state._lazy_init()  # the model's own first, as forward would do it
            for group in param_groups(state):
                # FSDP2 shards parameters before a state dict is made. Here whoever needs shards says so.
                for handle in group._module_to_pre_save_state_dict_hook_handle.values():
                    handle.remove()

        def gather(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
            self._gather_state(state, prefix)

        # A function, not a method: torch puts a mark on it.
        module.register_state_dict_post_hook(gather)  # type: ignore[no-untyped-call]  # untyped in torch
        sharded = dict(module.named_parameters(remove_duplicate=False))
        self.gather()
        for name, param in module.named_parameters(remove_duplicate=False):
            note_whole(param, sharded[name])  # FSDP2 gathers into the same parameters every time

    def gather(self) -> None:
        """Make the module's parameters whole, as after an update."""
        for piece in self._pieces:
            piece.unshard()

    @contextmanager
    def as_held(self) -> Iterator[None]:
        """In the `with` block parameters are the shards that this rank holds, and so is the module's state."""
        self._core.strategy.reshard()
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before
            if not before:
                self.gather()

    def _gather_state(self, state: dict[str, Any], prefix: str) -> None:
        """Between the backwards of an accumulation parameters are shards: then all ranks ask for the state."""
        if self._is_held or prefix:
            return
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = whole(value.detach())


def param_groups(state: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together; a state of torch 2.11 and 2.12 has at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
