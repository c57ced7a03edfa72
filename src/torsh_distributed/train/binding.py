"""Binds the user's optimizer to the parameters that the model has once it is spread over the ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.parallel.state.whole_state import carried, named_params
from torsh_distributed.plan import Plan

_log = logging.getLogger(__name__)

OptimizerFn = Callable[[Any], Optimizer]
"""Takes the model's parameters, as `torch.optim.AdamW` does; `functools.partial` fills in the rest."""


def prepare_optimizer(model: nn.Module, optimizer: Optimizer | OptimizerFn) -> Callable[[nn.Module], Optimizer]:
    """Check the optimizer against the model as it is now; returns a function that binds it to the spread model.

    An optimizer function is called then, with the final parameters. In an existing optimizer each parameter is replaced
    by the one that now has its name, with the state it already has.
    """
    trained = {id(param): name for name, param in named_params(model).items() if param.requires_grad}
    if not trained:
        raise InvalidArgument(
            "the model has no parameter that requires a gradient", hint="unfreeze the part that should learn"
        )
    if not isinstance(optimizer, Optimizer):
        return lambda spread: _call(optimizer, spread, model)
    names = {id(param): name for name, param in named_params(model).items()}
    held = [[names.get(id(param)) for param in group["params"]] for group in optimizer.param_groups]
    if not any(id(param) in trained for group in optimizer.param_groups for param in group["params"]):
        raise InvalidArgument(
            "the optimizer holds none of the model's parameters",
            hint="build the optimizer from model.parameters() after the model has its final shape and device",
            first_parameter=next(iter(trained.values())),
        )
    foreign = sum(name is None for group in held for name in group)
    _refuse_foreign(foreign)
    return lambda spread: _rebind(optimizer, held, spread)


def refuse_step_hooks(optimizer: Optimizer, plan: Plan) -> None:
    """Refuse a user's hooks on the steps of an optimizer that gets pieces of parameters, or not all of them.

    A norm, a mean or random numbers in a hook would be those of the pieces, without an error.
    """
    tables = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    hooks = [hook for table in tables for hook in table.values() if not _is_ours(hook)]
    splits = [f"mesh.{name}" for name in ("tp", "pp", "ep") if plan.mesh.degrees[name] > 1]
    if plan.mesh.shard > 1 and plan.fsdp.strategy == "shard_optimizer":
        splits.append("fsdp.strategy shard_optimizer")
    if plan.offload.enabled:
        splits.append("offload")
    if splits and hooks:
        raise ConfigurationError(
            f"the optimizer has a step hook, and under {' and '.join(splits)} it gets only a part of the parameters on"
            " each rank: a norm or a mean in the hook would not be that of one process",
            hint="remove the hook and change weights between steps, in `with engine.whole_weights(change=True)`, and"
            " gradients by param.register_hook(…) or training.gradient_clipping; mesh.dp and mesh.shard take hooks",
            hooks=[_name(hook) for hook in hooks],
        )


def drop_unknown_kernels(optimizer: Optimizer, plan: Plan) -> None:
    """Have SGD and Adagrad update shards without `fused`: of fused kernels torch knows only Adam's for DTensors."""
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    if not groups or plan.mesh.shard == 1 or not isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        return
    for group in groups:
        group["fused"] = False
    # It says that the kernel unscales by itself, which GradScaler would leave to it.
    optimizer._step_supports_amp_scaling = False
    if process_group.rank() == 0:
        _log.warning("torch has no fused %s for shards: they are updated without fused", type(optimizer).__name__)


def _is_ours(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torsh_distributed.")


def describe_optimizer(optimizer: Optimizer | OptimizerFn) -> dict[str, Any]:
    """The optimizer's class and the hyperparameters of its groups as plain values, to compare between ranks.

    Of a function that makes one: its name, and the arguments that `functools.partial` gives it.
    """
    if isinstance(optimizer, functools.partial):
        named = {name: plain_value(value) for name, value in optimizer.keywords.items()}
        return {"class": _name(optimizer.func), **named}
    if not isinstance(optimizer, Optimizer):
        return {"class": _name(optimizer)}
    found: dict[str, Any] = {"class": _name(type(optimizer)), "groups": len(optimizer.param_groups)}
    for number, group in enumerate(optimizer.param_groups):
        prefix = f"groups[{number}]." if len(optimizer.param_groups) > 1 else ""
        found |= {f"{prefix}{name}": plain_value(value) for name, value in group.items() if name != "params"}
    return found


def plain_value(value: Any) -> Any:
    """A value of an optimizer or scheduler as it can be sent and compared; objects by their names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else f"tensor of {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return {str(name): plain_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(inner) for inner in value]
    return _name(value) if callable(value) else _name(type(value))


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or type(value).__qualname__)


def _refuse_foreign(count: int) -> None:
    if count:
        raise InvalidArgument(
            "the optimizer holds parameters that are not the model's: they would not be kept equal on all ranks",
            hint="put them into the model; those of a loss: let one module have both and return the loss",
            num_foreign=count,
        )


def _call(optimizer_fn: OptimizerFn, spread: nn.Module, model: nn.Module) -> Optimizer:
    made = optimizer_fn(spread.parameters())
    if not isinstance(made, Optimizer):
        raise InvalidArgument(
            "the optimizer must be a torch.optim.Optimizer, or a function from parameters to one",
            hint="for example functools.partial(torch.optim.AdamW, lr=1e-3)",
            got=type(made).__name__,
        )
    # A function may take the parameters of the whole model, also those of stages on other ranks.
    known = {id(param) for one in (spread, model) for param in one.parameters()}
    _refuse_foreign(sum(id(param) not in known for group in made.param_groups for param in group["params"]))
    return made


def _rebind(optimizer: Optimizer, held: list[list[str | None]], spread: nn.Module) -> Optimizer:
    params = named_params(spread)
    is_here = {id(param) for param in spread.parameters()}
    if getattr(spread, "is_part_of_model", False):
        # A shared parameter may have another name here than in the whole model.
        here: Mapping[str, str] = getattr(spread, "names_here", {})
        params |= {name: params[own] for name, own in here.items() if own in params}
        _drop_others(optimizer, held, is_here, params.keys())
    for group, names in zip(optimizer.param_groups, held, strict=True):
        for place, name in enumerate(names):
            assert name is not None, "prepare_optimizer refuses foreign parameters"
            old, new = group["params"][place], params.get(name)
            if new is old or id(old) in is_here:
                continue
            if new is None or new.shape != old.shape:
                raise InvalidArgument(
                    f"the optimizer cannot follow {name}: the plan splits it",
                    hint="give a function in place of the optimizer: it is called with the final parameters",
                )
            group["params"][place] = new
            if old in optimizer.state:
                optimizer.state[new] = carried(optimizer.state.pop(old), new)
    return optimizer


def _drop_others(
    optimizer: Optimizer, held: list[list[str | None]], is_here: set[int], names_here: Collection[str]
) -> None:
    """Drop the parameters of pipeline stages on other ranks."""
    for group, names in zip(optimizer.param_groups, held, strict=True):
        kept = [
            place
            for place, (name, param) in enumerate(zip(names, group["params"], strict=True))
            if id(param) in is_here or name in names_here
        ]
        for place, param in enumerate(group["params"]):
            if place not in kept:
                optimizer.state.pop(param, None)
        group["params"] = [group["params"][place] for place in kept]
        names[:] = [names[place] for place in kept]
