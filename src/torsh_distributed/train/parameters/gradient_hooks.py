"""Hooks that users put on parameters, run on the gradient of all samples, as in one process.

Autograd runs them on what a rank has at that moment: the gradient of its own samples, of one microbatch, of a piece of
the parameter. A sharded parameter is a new tensor, whose hooks are none at all. So they are taken off before the model
is spread, and run before the update on the whole gradient, which is gathered for the parameters that have hooks.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.parallel.state.whole_state import named_params, plain_name
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.plan import Plan

Hooks = MutableMapping[int, Callable[[Any], Any]]
"""By the number of the handle that removes one, as torch keeps them."""


@dataclass
class _ParamHooks:
    """The hooks of one parameter. Torch's own tables stay, so that a user's handle can still remove one."""

    shape: torch.Size
    on_gradient: list[tuple[Hooks, Hooks]] = field(default_factory=list)
    """Torch's table, and what was in it."""
    on_param: list[tuple[Hooks, Hooks]] = field(default_factory=list)
    """The same of `register_post_accumulate_grad_hook`."""


class GradientHooks:
    """The users' hooks on a model's parameters, by name."""

    def __init__(self, model: nn.Module) -> None:
        """Take over the hooks of a model that is about to be spread."""
        self._by_name: dict[str, _ParamHooks] = {}
        self._has_begun = False
        for name, param in model.named_parameters():
            self._take(name, param, param._backward_hooks, "on_gradient")
            self._take(name, param, param._post_accumulate_grad_hooks, "on_param")

    def take_late(self, model: nn.Module, *, asks_others: bool) -> None:
        """Take over the hooks that were put on parameters since, before the first step; later calls do nothing.

        With `asks_others` every rank calls this: a rank that holds no part of a parameter, as another stage of a
        pipeline, has no hook on it, and takes part in gathering its gradient all the same.
        """
        if self._has_begun:
            return
        self._has_begun = True
        for name, param in model.named_parameters():
            self._take(plain_name(name), param, param._backward_hooks, "on_gradient")
        if asks_others:
            self._agree(named_params(model))

    def _agree(self, params: dict[str, nn.Parameter]) -> None:
        names = sorted({name for names in all_gather_object(sorted(self._by_name)) for name in names})
        if not names:
            return
        held = {name: name in self._by_name for name in names if name in params and not params[name].is_meta}
        everyone = all_gather_object(held)
        for name in names:
            without = [rank for rank, one in enumerate(everyone) if one.get(name) is False]
            if without:
                raise InvalidArgument(
                    f"{name} has a gradient hook on some ranks and none on others: their parameters would drift apart",
                    hint="register the hook on every rank",
                    ranks_without=without,
                )
        self._by_name = {name: self._by_name.get(name, _ParamHooks(torch.Size())) for name in names}

    def _take(self, name: str, param: Tensor, table: Hooks | None, kind: str) -> None:
        found = {number: hook for number, hook in (table or {}).items() if hook is not _nothing}
        if not found or table is None:
            return
        hooks = self._by_name.setdefault(name, _ParamHooks(param.shape))
        getattr(hooks, kind).append((table, found))
        for number in found:
            table[number] = _nothing

    def give_back(self) -> dict[str, list[Hooks]]:
        """Put the hooks back, for an engine that has autograd run them; returns torch's tables of them, by parameter.

        Those of `register_post_accumulate_grad_hook` are back too, and not in what is returned.
        """
        for hooks in self._by_name.values():
            for table, found in (*hooks.on_gradient, *hooks.on_param):
                table.update({number: hook for number, hook in found.items() if number in table})
        tables = {name: [table for table, _ in hooks.on_gradient] for name, hooks in self._by_name.items()}
        self._by_name = {}
        return {name: found for name, found in tables.items() if found}

    def check(self, strategy: Strategy, plan: Plan) -> None:
        """Refuse hooks on gradients that leave during backward, and on parameters of which this rank has a part."""
        if plan.offload.enabled and self._by_name:
            raise ConfigurationError(
                f"{next(iter(self._by_name))} has a gradient hook, and offload takes gradients away during backward",
                hint="remove the hook, or set offload.enabled = false",
                key="offload.enabled",
            )
        params = named_params(strategy.whole_model)
        for name, hooks in self._by_name.items():
            param = params.get(name)
            is_whole = param is not None and param.shape == hooks.shape and not hasattr(param, "to_local")
            if hooks.on_param and not is_whole:
                raise ConfigurationError(
                    f"{name} has a hook of register_post_accumulate_grad_hook(), which would be called with a part of"
                    " the parameter",
                    hint="use param.register_hook(hook): it gets the whole gradient under every plan; or set mesh.dp",
                    parameter=name,
                )

    def run(self, strategy: Strategy) -> None:
        """Replace gradients by what the hooks make of them; every rank calls this, with gradients of all samples."""
        if not self._by_name:
            return
        params, parts = named_params(strategy.whole_model), strategy.state_parts()
        for name, hooks in self._by_name.items():
            param = params[name]
            before = param.grad
            gradient = strategy.whole_gradient(name, torch.zeros_like(param) if before is None else before)
            if before is None:
                continue  # another stage's, or not part of this loss: autograd would not call its hooks either
            for hook in _current(hooks.on_gradient):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            param.grad = parts.part(name, gradient, param).to(param.dtype)
            for hook in _current(hooks.on_param):
                hook(param)


def _current(taken: list[tuple[Hooks, Hooks]]) -> list[Callable[[Any], Any]]:
    """The hooks whose handles have not removed them."""
    return [hook for table, found in taken for number, hook in found.items() if number in table]


def _nothing(_: object) -> None:
    """In the place of a hook that was taken over."""
