"""Pipeline stages whose parameters are sharded over the ranks that hold the same stage."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.data.bucket_reduction import bucket_reducer
from torsh_distributed.parallel.data.ddp import REDUCE_DTYPES, can_divide_last, refuse_what_cannot_be_compressed
from torsh_distributed.parallel.data.gradient_sync import GradientSync, gradients_held
from torsh_distributed.parallel.expert.spreading import expert_sharding
from torsh_distributed.parallel.expert.stacked_experts import spread_params
from torsh_distributed.parallel.mesh.layout import GRADIENT_AXES, REPLICA_AXES
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.models.wrapping import ignored_modules, pieces_of
from torsh_distributed.parallel.pipeline import StagePlan
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
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


class StageShards:
    """Shards each stage separately with FSDP2; torch's schedules gather before a stage runs and reduce after its last
    backward.

    The plan's patterns for pieces refer to the whole model, so they are resolved there: a pattern need not match in
    every stage. Construct it once the model has its final layers, instead of sharding the whole model.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh) -> None:
        self._plan, self._mesh = plan, mesh
        self._pieces = {id(module) for module in pieces_of(model, plan.fsdp).values()}
        self._ignored = {id(module) for module in ignored_modules(model, plan.fsdp.ignored_modules).values()}
        self.parts: dict[int, FullyShardedDataParallel] = {}
        """This rank's stages by index."""

    def shard(self, index: int, stage: nn.Module) -> nn.Module:
        """Shard a stage in place; the ranks of the same stage call this."""
        ignored = tuple(name for name, module in stage.named_modules() if id(module) in self._ignored)
        self.parts[index] = FullyShardedDataParallel(
            stage,
            self._plan.fsdp.replace(ignored_modules=ignored),
            mesh=self._mesh,
            precision=self._plan.precision,
            wrap_fn=lambda _, module: id(module) in self._pieces,
            seed=self._plan.training.seed,
            # As in a pipeline of replicas: each uses its own buffers.
            broadcast_buffers=False,
            compression=self._plan.compress,
            separate=expert_sharding(stage, self._mesh),
        )
        _allow_no_arguments(stage)
        return stage

    def attach(self, optimizer: Optimizer) -> None:
        """Count the optimizer's steps for compression."""
        for part in self.parts.values():
            if part.compressor is not None:
                optimizer.register_step_post_hook(partial(_count_step, part.compressor))

    def reshard(self) -> None:
        """Free what was left gathered, as after evaluation."""
        for part in self.parts.values():
            part.reshard()

    def rescale(self, factor: float) -> None:
        """Gradients are `factor` times as large from now on."""
        for part in self.parts.values():
            if part.compressor is not None:
                part.compressor.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        """The error that compression carries over, by stage."""
        return {
            str(index): part.compressor.state_dict()
            for index, part in self.parts.items()
            if part.compressor is not None
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict()`."""
        for index, part in self.parts.items():
            if part.compressor is not None and str(index) in state:
                part.compressor.load_state_dict(state[str(index)])


_NOTHING = object()
"""Stands for the arguments of a stage that has none."""


def _allow_no_arguments(stage: nn.Module) -> None:
    """FSDP2 moves the arguments of a module to its GPU, and fails where there are none: the first stage gets its inputs
    from the pipeline. Drop it when torch's `_root_pre_forward` takes none."""

    def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if args or kwargs else ((_NOTHING,), kwargs)

    def remove(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ((), kwargs) if args and args[0] is _NOTHING else None

    stage.register_forward_pre_hook(add, prepend=True, with_kwargs=True)
    stage.register_forward_pre_hook(remove, with_kwargs=True)


def _count_step(compressor: GradientCompressor, *_: object) -> None:
    compressor.step()


def refuse_shared_on_one_rank(stages: StagePlan, stage_of: Mapping[int, int]) -> None:
    """Refuse a parameter of two stages on one rank: it would become two shards, which diverge."""
    for uses in stages.tied:
        ranks = {stage: stage_of[stage] for stage, _ in uses}
        if len(set(ranks.values())) < len(ranks):
            first, second = (next(name for stage, name in uses if stage == one) for one in list(ranks)[:2])
            raise ConfigurationError(
                f"{first} and {second} are one parameter of two stages on one rank, which mesh.shard cannot keep tied",
                hint="choose a schedule that puts them on different ranks, such as one_f_one_b; or use mesh.dp in"
                " place of mesh.shard, or do not tie them",
                stages=sorted(ranks),
            )
