"""Data parallelism: every rank holds the whole model and works on its part of the batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypedDict

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from torsh_distributed.parallel.data.ddp import Compression, DistributedDataParallel, ReduceDtype
from torsh_distributed.parallel.mesh.mean import mean_over
from torsh_distributed.parallel.optim.cpu_adam import CpuAdam
from torsh_distributed.parallel.strategy import PendingNumber, Strategy
from torsh_distributed.plan import DdpConfig, Plan
from torsh_distributed.plan.sections.distributed import DistributedConfig

_log = logging.getLogger(__name__)


class GradientOptions(TypedDict, total=False):
    """The format in which gradients travel; by default the one they have."""

    compression: Compression
    reduce_dtype: ReduceDtype
    seed: int


def gradient_options(plan: Plan) -> GradientOptions:
    """The format that a plan asks for."""
    return {
        "compression": plan.compress,
        "reduce_dtype": plan.precision.reduce_dtype,
        "seed": plan.training.seed,
    }


class DataParallel(Strategy):
    """Replicas kept equal by averaging gradients in buckets while backward still computes."""

    def __init__(
        self,
        model: nn.Module,
        config: DdpConfig,
        distributed: DistributedConfig | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        **options: Unpack[GradientOptions],
    ) -> None:
        self._ddp = DistributedDataParallel(model, config, group=group, distributed=distributed, **options)
        self._group = self._ddp.process_group

    @property
    @override
    def model(self) -> DistributedDataParallel:
        return self._ddp

    @property
    @override
    def data_rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    @override
    def data_degree(self) -> int:
        return dist.get_world_size(self._group)

    @override
    def attach(self, optimizer: Optimizer) -> None:
        if type(optimizer) is CpuAdam:
            optimizer.divide(self._ddp.averaged_parameters(), self._group)

    @override
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else self._ddp.no_sync()

    @override
    def mean_loss(self, loss: Tensor) -> PendingNumber:
        return mean_over(loss, self._group)

    @override
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        # After backward every rank holds the same averaged gradients: the local norm is the norm.
        return nn.utils.clip_grad_norm_(self._ddp.parameters(), max_norm)

    @override
    def take_comm_s(self) -> float | None:
        return self._ddp.take_comm_s()

    @override
    def rescale(self, factor: float) -> None:
        if self._ddp.compressor is not None:
            self._ddp.compressor.rescale(factor)

    @override
    def state_dict(self) -> dict[str, Any]:
        compressor = self._ddp.compressor
        return {} if compressor is None else {"compressor": compressor.state_dict()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        compressor = self._ddp.compressor
        if compressor is not None and "compressor" in state:
            compressor.load_state_dict(state["compressor"])
        elif "compressor" in state:
            _log.warning("the state was saved under compression, and this run has none: what was left out is lost")
