"""What a plan with `server.training` makes of the optimizer that the user gave."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.data.lone_replicas import LoneReplicas
from torsh_distributed.parallel.state.whole_state import named_params
from torsh_distributed.plan import Plan
from torsh_distributed.train.optimizers.async_sgd import AsyncSGD
from torsh_distributed.train.optimizers.elastic_averaging import ElasticCenter
from torsh_distributed.train.optimizers.served_parameters import ServedParameters


def keep_together(strategy: LoneReplicas, optimizer: Optimizer, plan: Plan) -> Optimizer:
    """The optimizer to step; every rank calls this.

    Under `asynchronous` the servers do what the given one would do. Under `elastic_averaging` each rank has it for its
    own steps.
    """
    section = plan.server
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    params = [(name, param) for name, param in named_params(strategy.unwrapped).items() if id(param) in held]
    names = section.names or None
    timeout_s = plan.distributed.timeout_s
    if section.training == "elastic_averaging":
        served = ServedParameters(params, servers=names, timeout_s=timeout_s)
        consistency: Literal["bsp", "async"] = "bsp" if section.waits else "async"
        center = ElasticCenter(served, optimizer, alpha=section.alpha, period=section.period, consistency=consistency)
        optimizer.register_step_post_hook(lambda *_: center.after_step())
        strategy.common = center
        process_group.before_destroy(served.close)
        return optimizer
    made = AsyncSGD(
        params,
        optimizer=_name_of(optimizer),
        staleness=section.staleness,
        servers=names,
        push_codec=section.push_codec,
        pull_codec=section.pull_codec,
        timeout_s=timeout_s,
        **_options_of(optimizer),
    )
    made.sets_options = process_group.rank() == 0
    strategy.common = made
    process_group.before_destroy(made.close)
    return made


def _name_of(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is kind:
        return str(kind.__name__)
    return f"{kind.__module__}:{kind.__qualname__}"


def _options_of(optimizer: Optimizer) -> dict[str, Any]:
    """What its constructor was given, as far as that is plain."""
    if len(optimizer.param_groups) > 1:
        raise ConfigurationError(
            "the optimizer has several groups of parameters, and servers have one",
            hint='give all parameters the same settings, or use server.training = "elastic_averaging"',
            key="server.training",
            num_groups=len(optimizer.param_groups),
        )
    known = inspect.signature(type(optimizer)).parameters
    how = ("params", "foreach", "fused", "capturable", "differentiable")  # of the kernels, not of the update
    return {key: value for key, value in optimizer.param_groups[0].items() if key in known and key not in how}
