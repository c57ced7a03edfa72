"""A model that an engine only runs: the reference and the reward model of an RLHF loop, or any model to evaluate.

DeepSpeed makes such an engine of a model without an optimizer. Without gradients there is nothing to average or to
shard but the parameters, so stages 0 to 2 are plain replicas, and stage 3 shards parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.groups import process_group
from torsh_distributed.migrate.deepspeed.deepspeed_errors import DeepSpeedMistake
from torsh_distributed.parallel.choose import strategy_for
from torsh_distributed.parallel.data.replicated_params import broadcast_from_first
from torsh_distributed.parallel.models.same_model import check_same_model
from torsh_distributed.parallel.strategy import PendingNumber, Strategy
from torsh_distributed.plan import Plan
from torsh_distributed.train.engine import Engine


class NoOptimizer(Optimizer):
    """In the place of an optimizer: it has no parameters, and a step is a mistake of the script."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {"lr": 0.0})

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # it never returns
        """Refuse."""
        raise no_optimizer("step")


def no_optimizer(call: str) -> DeepSpeedMistake:
    """The error of a call that needs an optimizer, in DeepSpeed's words."""
    return DeepSpeedMistake(
        f"must provide optimizer during init in order to use {call}",
        hint='pass optimizer=… to initialize(), or add {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}',
    )


class Replicas(Strategy):
    """The whole model on every rank, with the values of rank 0; nothing is sent afterwards."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        broadcast_from_first((*module.parameters(), *module.buffers()), resolve_group(None))

    @property
    @override
    def model(self) -> nn.Module:
        return self._module

    @property
    @override
    def unwrapped(self) -> nn.Module:
        return self._module

    @property
    @override
    def data_rank(self) -> int:
        return process_group.rank()

    @property
    @override
    def data_degree(self) -> int:
        return process_group.world_size()

    @override
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def mean_loss(self, loss: Tensor) -> PendingNumber:
        raise no_optimizer("backward")

    @override
    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        raise no_optimizer("step")

    @override
    def take_comm_s(self) -> float | None:
        return None


def untrained_core(model: nn.Module, plan: Plan) -> Engine:
    """The Engine of a model that is not trained; every rank calls this. `plan` shards parameters or does not."""
    num_ranks = process_group.world_size()
    plan.validate(num_ranks)
    resolved = plan.resolve(num_ranks)
    check_same_model(model)
    shards = resolved.mesh.shard > 1 and resolved.fsdp.strategy in ("full_shard", "hybrid_shard")
    strategy = strategy_for(model, resolved) if shards else Replicas(model)
    return Engine(strategy, NoOptimizer(), resolved, loss_fn=None)
