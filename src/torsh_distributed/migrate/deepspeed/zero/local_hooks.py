"""Scripts' hooks on parameters, run where DeepSpeed runs them: in each backward, on this rank's own gradient.

Our Engine takes hooks off and runs them once per update, on the gradient of all samples. Scripts that came over were
tuned with the other meaning: their hooks see each microbatch, scaled, before ranks are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.zero.whole_between_steps import param_groups
from torsh_distributed.parallel.state.whole_state import named_params
from torsh_distributed.train.engine import Engine

Table = Mapping[int, Callable[[Any], Any]]
"""Hooks by the number of the handle that removes one: torch's own table, so that a removed hook is gone from it."""


class LocalHooks:
    """The gradient hooks of one engine's parameters; takes them from the Engine under it.

    Whole parameters have theirs as torch keeps them. In the place of a shard autograd differentiates FSDP2's own
    gathered parameter, which exists after the first forward: `attach` puts the hooks of the shard on it.
    """

    def __init__(self, core: Engine) -> None:
        taken, core.gradient_hooks = core.gradient_hooks, None
        given = {} if taken is None else taken.give_back()
        pieces = [one for one in core.unwrapped.modules() if isinstance(one, FSDPModule)]
        self._shards: list[Any] = [
            shard for piece in pieces for group in param_groups(piece._get_fsdp_state()) for shard in group.fsdp_params
        ]
        names = {id(shard.sharded_param): shard for shard in self._shards}
        params = named_params(core.strategy.whole_model)
        self._given: dict[int, list[Table]] = {}
        """By the identity of a shard, the tables of the parameter that it was before it was sharded."""
        self._attached: dict[int, Table] = {}
        """The tables that are on gathered parameters, by identity."""
        for name, tables in given.items():
            param = params.get(name)
            if param is not None and id(param) in names and core.plan.mesh.pp == 1:
                self._given[id(names[id(param)])] = list(tables)
            elif param is None or not (param.is_meta or any(param._backward_hooks is table for table in tables)):
                raise FeatureNotAvailable(
                    f"the gradient hook of {name} would never be called: this engine has another tensor in its place",
                    hint="register the hook after deepspeed.initialize, or train at ZeRO stage 0 or 1",
                    parameter=name,
                )

    def attach(self) -> None:
        """Between forward and backward: hooks of shards, those that came since too, are on what backward reaches."""
        for shard in self._shards:
            sharded, whole = shard.sharded_param, getattr(shard, "unsharded_param", None)
            if sharded._post_accumulate_grad_hooks:
                raise FeatureNotAvailable(
                    "register_post_accumulate_grad_hook() on a sharded parameter would never be called",
                    hint="use register_hook(hook): it gets this rank's gradient of the whole parameter",
                )
            late = [sharded._backward_hooks] if sharded._backward_hooks else []
            for table in (*self._given.get(id(shard), ()), *late):
                if id(table) not in self._attached and whole is not None and whole.requires_grad:
                    self._attached[id(table)] = table
                    whole.register_hook(_running(table))


def _running(table: Table) -> Callable[[Tensor], Tensor]:
    """One hook that runs those of a table, as they are then."""

    def run(gradient: Tensor) -> Tensor:
        for hook in list(table.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    return run
