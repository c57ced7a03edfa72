"""Offloads optimizer state only; parameters and gradients stay where they are."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.local_tensors import local_of
from torsh_distributed.parallel.offload.budget import GB, make_storage, workspace_bytes
from torsh_distributed.parallel.offload.offload_stats import OffloadStats
from torsh_distributed.parallel.offload.paged import PagedDataParallel
from torsh_distributed.parallel.offload.paging.pressure import POLICIES, PressureRelief
from torsh_distributed.parallel.offload.shards.shard_offload_strategy import ShardedOffload
from torsh_distributed.parallel.offload.storage.forms import FORMS
from torsh_distributed.parallel.offload.storage.mover import mover_for
from torsh_distributed.parallel.offload.storage.tiers import MemoryBudget
from torsh_distributed.parallel.offload.update.optimizer import OffloadedOptimizer, require_adam
from torsh_distributed.parallel.offload.update.param_state import place_param_state
from torsh_distributed.parallel.offload.update.targets import ParamTarget, flat_of
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.plan import Plan
from torsh_distributed.plan.sections.offload import OffloadConfig


class StateOffload:
    """Stores the master values and moments of an optimizer; `optimizer` is the one to use from now on.

    Works with plain parameters, with DDP, and with DTensors (FSDP2), of which each rank stores the state of its own
    shard. fp32 parameters on the host (FSDP2 with CPUOffloadPolicy) are updated in place.
    Every rank of `group` creates it; close it, or use it as a context manager.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: OffloadConfig,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if config.params or config.grads:
            raise InvalidArgument(
                "StateOffload moves optimizer state only",
                hint="set offload.params and offload.grads to false, or use PagedDataParallel",
            )
        self._group = group if group is not None else dist.group.WORLD if dist.is_initialized() else None
        names = {id(param): name for name, param in model.named_parameters()}
        held = [param for entry in optimizer.param_groups for param in entry["params"]]
        device = local_of(held[0]).device
        self._budget = MemoryBudget(
            "device memory", int(config.gpu_memory_budget_gb * GB), setting="gpu_memory_budget_gb"
        )
        with fail_together("offload the optimizer", self._group):
            require_adam(optimizer)
            self._storage = make_storage(config, device)
            try:
                targets = self._place([(names.get(id(param), "a parameter"), param) for param in held], config)
            except BaseException:
                self._storage.close()
                raise
        self._mover = mover_for(device)
        self._relief = PressureRelief(POLICIES[config.auto_memory_management], storage=self._storage, pager=None)
        self.optimizer = OffloadedOptimizer(optimizer, targets, storage=self._storage, mover=self._mover)
        self.optimizer.after_step = self._relief.relieve
        self.optimizer.owner = self

    def stats(self) -> OffloadStats:
        """Measured statistics so far; hits and misses are 0 because nothing is fetched ahead."""
        return OffloadStats.measure(self._storage, self._budget, update_s=self.optimizer.update_s)

    def close(self) -> None:
        """Free storage; the optimizer cannot be used afterwards."""
        self._mover.close()
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _place(self, params: list[tuple[str, nn.Parameter]], config: OffloadConfig) -> list[ParamTarget]:
        form = FORMS[config.cpu_compression]
        trained = [(name, param) for name, param in params if param.requires_grad]
        left = config.device_optimizer_ratio * sum(local_of(param).numel() for _, param in trained)
        targets = []
        for name, param in trained:
            flat = flat_of(param)
            left -= flat.numel()
            stays = left >= 0
            if stays:
                self._budget.charge((8 if flat.dtype == torch.float32 else 12) * flat.numel(), f"the state of {name}")
            targets.append(place_param_state(name, param, self._storage, form, stays=stays))
        everything = [piece for target in targets for piece in target.pieces]
        self._storage.host.budget.charge(workspace_bytes(everything), "room to decode pieces in")
        return targets


def paged_strategy(model: nn.Module, plan: Plan) -> PagedDataParallel:
    """Replicas (or one process) with parameters and gradients off the device, for a plan that pages its model."""
    assert plan.mesh.dp == plan.mesh.data_degree, "Plan.validate refuses other axes"
    return PagedDataParallel(model, plan.offload, plan.distributed, broadcast_buffers=plan.ddp.broadcast_buffers)


def offloaded_optimizer(strategy: Strategy, optimizer: Optimizer, plan: Plan) -> Optimizer:
    """The optimizer to train with: one whose state is where the plan wants it."""
    if isinstance(strategy, PagedDataParallel | ShardedOffload):
        return strategy.offload_optimizer(optimizer)
    return StateOffload(strategy.unwrapped, optimizer, plan.offload).optimizer
