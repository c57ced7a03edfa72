"""Which part of offload a plan asks for."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from torsh_distributed.parallel.offload.paged import PagedDataParallel
from torsh_distributed.parallel.offload.state_offload import StateOffload
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.plan import Plan


def paged_strategy(model: nn.Module, plan: Plan) -> PagedDataParallel:
    """Replicas (or one process) with parameters and gradients off the device, for a plan that pages its model."""
    assert plan.mesh.dp == plan.mesh.data_degree, "Plan.validate refuses other axes"
    return PagedDataParallel(model, plan.offload, plan.distributed, broadcast_buffers=plan.ddp.broadcast_buffers)


def offloaded_optimizer(strategy: Strategy, optimizer: Optimizer, plan: Plan) -> Optimizer:
    """The optimizer to train with: the one given, or one whose state is where the plan wants it."""
    if not plan.offload.enabled:
        return optimizer
    if isinstance(strategy, PagedDataParallel):
        return strategy.offload_optimizer(optimizer)
    return StateOffload(strategy.unwrapped, optimizer, plan.offload).optimizer
