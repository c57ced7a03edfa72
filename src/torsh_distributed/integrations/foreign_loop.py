"""What strategies for other trainers share: a plan made ready for a loop that calls backward and steps by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.launch.worker.init import init, init_process_group
from torsh_distributed.parallel.choose import strategy_for
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.plan import Plan

_OWN_LOOP = {
    "mesh.tp": "the loss is computed inside the axis",
    "mesh.pp": "a schedule runs forward and backward together",
    "mesh.cp": "batches are cut along the sequence",
}


class ForeignLoop:
    """A model spread as a plan says, for a loop that is not the Engine's: replicas, or shards of parameters.

    Every rank makes one. Axes that need the Engine's loop are refused; so are settings of the plan that the other
    trainer has its own for, such as the precision.
    """

    def __init__(self, plan: Plan | None, *, trainer: str) -> None:
        self.plan = plan or Plan()
        self._strategy: Strategy | None = None
        for key, why in _OWN_LOOP.items():
            axis = key.partition(".")[2]
            if getattr(self.plan.mesh, axis) > 1:
                raise ConfigurationError(
                    f"{key} does not work in {trainer}'s loop: {why}",
                    hint="use mesh.dp and mesh.shard there, or train with parallelize() and the Engine",
                )
        theirs = {
            "precision.dtype": (self.plan.precision.dtype, "fp32"),
            "training.gradient_accumulation": (self.plan.training.gradient_accumulation, 1),
            "training.gradient_clipping": (self.plan.training.gradient_clipping, None),
            "offload.enabled": (self.plan.offload.enabled, False),
        }
        for key, (value, default) in theirs.items():
            if value != default:
                raise ConfigurationError(
                    f"{key} = {value} has no effect in {trainer}'s loop", hint=f"set it in {trainer}, not in the plan"
                )

    def join_world(self, *, rank: int, world_size: int, master_addr: str, master_port: int, is_launched: bool) -> None:
        """Bring up the process group, unless there is one: by the launcher's variables, or with this place."""
        if dist.is_initialized():
            return
        if is_launched:
            init(self.plan)
            return
        section = self.plan.distributed
        init_process_group(section.backend, rank, world_size, master_addr, master_port, section.timeout_s)

    def spread(self, model: nn.Module) -> nn.Module:
        """The wrapped model; `model` itself is changed if it is sharded. Optimizers come after this."""
        size = process_group.world_size()
        self.plan.validate(size)
        self._strategy = strategy_for(model, self.plan.resolve(size))
        return self._strategy.model

    def attach(self, optimizers: list[Optimizer]) -> None:
        """Hook into the optimizers' steps, where the strategy needs it."""
        for optimizer in optimizers:
            self.strategy.bind(optimizer)

    @property
    def strategy(self) -> Strategy:
        """How the model is spread; after `spread`."""
        assert self._strategy is not None, "trainers set the model up first"
        return self._strategy

    @property
    def is_spread(self) -> bool:
        """Whether `spread` was called."""
        return self._strategy is not None

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around backward of all microbatches but the last: gradients are not averaged."""
        with self.strategy.accumulating(is_last=False):
            yield

    def model_state(self) -> dict[str, Any]:
        """The model's state with whole tensors, equal on every rank; all ranks call this."""
        return dict(self.strategy.whole_tensors())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state by parameter name with whole tensors; all ranks call this."""
        found: dict[str, Any] = self.strategy.whole_state(optimizer)["optimizer"]
        return found

    def load(self, optimizer: Optimizer, model_state: Any, optimizer_state: Any) -> None:
        """Load both states, saved at any world size."""
        self.strategy.load_whole_state(optimizer, {"model": model_state, "optimizer": optimizer_state})
