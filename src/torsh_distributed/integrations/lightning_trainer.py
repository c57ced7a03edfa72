"""`TorshStrategy` for Lightning's Trainer: `Trainer(strategy=TorshStrategy(plan=plan), devices=2)`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.integrations.foreign_loop import ForeignLoop
from torsh_distributed.parallel.state.whole_state import load_model_state
from torsh_distributed.plan import Plan


class TorshStrategy(DDPStrategy):  # type: ignore[misc]  # Lightning is optional and not checked
    """Replicas or shards as the plan says, on our default backend, in Lightning's own loop.

    `plan` gives the mesh (dp, shard), buckets, compression and FSDP2's settings; precision, clipping and accumulation
    stay the Trainer's. Checkpoints hold whole tensors and load at any world size.
    """

    strategy_name = "torsh"

    def __init__(self, plan: Plan | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._loop = ForeignLoop(plan, trainer="Lightning")

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
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
    def _setup_model(self, model: nn.Module) -> nn.Module:
        return self._loop.spread(model)

    @override
    def configure_ddp(self) -> None:
        self.model: Any = self._setup_model(self.lightning_module)

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self._loop.attach(self.optimizers)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self._loop.accumulating():
            yield

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._loop.is_spread:
            found: dict[str, Any] = super().lightning_module_state_dict()
            return found
        return self._loop.model_state()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        load_model_state(self.lightning_module, checkpoint["state_dict"])

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self._loop.optimizer_state(plain)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self._loop.load(optimizer, checkpoint["state_dict"], state)

    @override
    def teardown(self) -> None:
        self.model = self.lightning_module  # unwrapped, so the parent asks no reducer for its statistics
        super().teardown()
