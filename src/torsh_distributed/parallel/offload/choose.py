"""What offload goes together with, and what it refuses."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.offload.paged import PagedDataParallel
from torsh_distributed.parallel.offload.state_offload import StateOffload
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.plan import Plan


def moves_params_or_grads(plan: Plan) -> bool:
    """Whether offload looks after the parameters itself, and so is the strategy, not a part of another."""
    return plan.offload.enabled and (plan.offload.params or plan.offload.grads)


def paged_strategy(model: nn.Module, plan: Plan) -> PagedDataParallel:
    """Replicas (or one process) with parameters and gradients off the device; other splits of the model are refused."""
    for axis, degree in plan.mesh.degrees.items():
        if axis != "dp" and degree > 1:
            _refuse(
                f"offload.params and offload.grads are for replicas, not for mesh.{axis}",
                "set both to false: the optimizer state of every rank's shard is offloaded then",
                plan,
            )
    if plan.precision.dtype == "fp16":
        _refuse(
            "offload.params and offload.grads do not go together with fp16's loss scaling",
            'use precision.dtype = "bf16", which needs none, or offload the optimizer state only',
            plan,
        )
    if plan.compress.method != "none":
        _refuse(
            "offload.params and offload.grads send gradients as they are, without compression",
            'set compress.method = "none", or offload the optimizer state only',
            plan,
        )
    return PagedDataParallel(model, plan.offload, plan.distributed, broadcast_buffers=plan.ddp.broadcast_buffers)


def offloaded_optimizer(strategy: Strategy, optimizer: Optimizer, plan: Plan) -> Optimizer:
    """The optimizer to train with: the one given, or one whose state is where the plan wants it."""
    if not plan.offload.enabled:
        return optimizer
    if isinstance(strategy, PagedDataParallel):
        return strategy.offload_optimizer(optimizer)
    for axis, degree in plan.mesh.degrees.items():
        if axis not in ("dp", "shard") and degree > 1:
            _refuse(f"offload does not go together with mesh.{axis}", "set offload.enabled = false", plan)
    if plan.mesh.shard > 1 and plan.fsdp.strategy == "shard_optimizer":
        _refuse(
            "fsdp.strategy = shard_optimizer looks after the optimizer state itself",
            "use fsdp.strategy = shard_grad_op or full_shard with offload",
            plan,
        )
    return StateOffload(strategy.unwrapped, optimizer, plan.offload).optimizer


def _refuse(what: str, hint: str, plan: Plan) -> None:
    raise ConfigurationError(what, hint=hint, equation=plan.mesh.equation)
