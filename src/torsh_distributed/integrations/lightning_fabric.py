"""`TorshFabricStrategy` for Lightning Fabric: `Fabric(strategy=TorshFabricStrategy(plan=plan), devices=2)`."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.integrations.foreign_loop import ForeignLoop
from torsh_distributed.parallel.state.whole_state import load_model_state, optimizer_state
from torsh_distributed.plan import Plan
from torsh_distributed.train.binding import prepare_optimizer


class TorshFabricStrategy(DDPStrategy):  # type: ignore[misc]  # Lightning is optional and not checked
    """Replicas or shards as the plan says, on our default backend, in a loop written with Fabric.

    Set model and optimizers up together (`fabric.setup(model, optimizer)`): sharding replaces the parameters, and the
    optimizer follows them. `fabric.save` writes whole tensors.
    """

    def __init__(self, plan: Plan | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._loop = ForeignLoop(plan, trainer="Fabric")
        self._backward_sync_control = _SyncControl(self._loop)

    @override
    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        assert self.cluster_environment is not None
        self._loop.join_world(
            rank=self.global_rank,
            world_size=self.world_size,
            master_addr=self.cluster_environment.main_address,
            master_port=self.cluster_environment.main_port,
            is_launched="RANK" in os.environ,
        )
        self._process_group_backend = str(torch.distributed.get_backend())

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        return self._loop.spread(module)

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        binding = [prepare_optimizer(module, optimizer) for optimizer in optimizers]
        wrapped = self._loop.spread(module)
        bound = [bind(self._loop.strategy.unwrapped) for bind in binding]
        self._loop.attach(bound)
        return wrapped, bound, scheduler

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return self._loop.model_state()

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        load_model_state(self._loop.strategy.unwrapped, state_dict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        strategy = self._loop.strategy
        return optimizer_state(strategy.unwrapped, optimizer, strategy.optimizer_parts(optimizer))


class _SyncControl(_BackwardSyncControl):  # type: ignore[misc]  # Lightning is optional and not checked
    def __init__(self, loop: ForeignLoop) -> None:
        self._loop = loop

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._loop.accumulating() if enabled else nullcontext()
