"""Averages the gradients of pipeline stages over the ranks that hold the same stage, as the plan says."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.parallel.data.bucket_reduction import bucket_reducer
from torsh_distributed.parallel.data.ddp import REDUCE_DTYPES, can_divide_last, refuse_what_cannot_be_compressed
from torsh_distributed.parallel.data.gradient_sync import GradientSync, gradients_held
from torsh_distributed.parallel.expert.stacked_experts import spread_params
from torsh_distributed.parallel.mesh.layout import GRADIENT_AXES, REPLICA_AXES
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.state.whole_state import named_params
from torsh_distributed.plan import Plan


class StageAverage:
    """Averages gradients that are not sharded, once a step after the schedule: only then are they complete.

    As in data parallelism they are summed as `distributed` says, in `precision.reduce_dtype`, or sent through
    `compress`. Every rank that holds the same stages constructs it. Spread experts are averaged over their replicas:
    backward through the exchange has already summed over the ranks along `ep`.
    """

    def __init__(self, stages: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> None:
        held = {
            name: param
            for name, param in named_params(stages).items()
            if param.requires_grad and not isinstance(param, DTensor)
        }
        spread = {id(param) for _, param in spread_params(stages).values()}
        self._experts = {name: param for name, param in held.items() if id(param) in spread}
        others = {name: param for name, param in held.items() if id(param) not in spread}
        self._ep = mesh.layout.degree("ep")
        self._averaged = [_AveragedParams(stages, others, plan, mesh.group(*GRADIENT_AXES), device)]
        if self._experts:
            self._averaged.append(_AveragedParams(stages, self._experts, plan, mesh.group(*REPLICA_AXES), device))

    @property
    def compressor(self) -> GradientCompressor | None:
        """What compresses gradients; None without compression."""
        return self._averaged[0].compressor

    @torch.no_grad()
    def average(self) -> None:
        """Average now; every rank that holds these stages calls this."""
        for param in self._experts.values():
            if param.grad is not None:
                param.grad.div_(self._ep)
        for params in self._averaged:
            params.average()


class _AveragedParams:
    """Parameters that are averaged over one group."""

    def __init__(
        self,
        stages: nn.Module,
        params: Mapping[str, nn.Parameter],
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._params, self._group = params, group
        self._max_bytes = int(plan.ddp.max_bucket_size_mb * 2**20)
        self._sync: GradientSync | None = None
        if group.size() == 1 or not params:
            return
        is_mean = can_divide_last(stages, device, plan.precision.reduce_dtype)
        op = ReduceOp.MEAN if is_mean else ReduceOp.SUM
        self._sync = GradientSync(
            {id(param): name for name, param in params.items()},
            group,
            bucket_reducer(plan.distributed, group, device, op=op),
            is_mean=is_mean,
            device=device,
            dtype=REDUCE_DTYPES[plan.precision.reduce_dtype],
            overlap=False,
            is_bucketed=plan.ddp.bucketing,
        )
        if plan.compress.method != "none" and plan.mesh.shard == 1:
            refuse_what_cannot_be_compressed(stages, plan.precision.reduce_dtype)
            self._sync.compress_with(GradientCompressor(plan.compress, seed=plan.training.seed))

    @property
    def compressor(self) -> GradientCompressor | None:
        return None if self._sync is None else self._sync.compressor

    def average(self) -> None:
        if self._sync is not None:
            self._sync.sync_now(gradients_held(self._params, self._group), max_bytes=self._max_bytes)
