"""Which strategy a plan asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from torsh_distributed.comm.groups import process_group
from torsh_distributed.parallel.activation import compile_and_checkpoint
from torsh_distributed.parallel.data.data_strategy import DataParallel, gradient_options
from torsh_distributed.parallel.data.lone_replicas import LoneReplicas
from torsh_distributed.parallel.expert.choose import expert_strategy, load_spread
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.models.materialize import Materializer, ParamInit, is_on_meta
from torsh_distributed.parallel.models.wrapping import matching
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
from torsh_distributed.parallel.sharded.shard_keeper import ShardKeeper
from torsh_distributed.parallel.sharded.sharded_strategy import Sharded
from torsh_distributed.parallel.sharded.zero1 import ShardedOptimizer
from torsh_distributed.parallel.strategy import Strategy, check_one_device
from torsh_distributed.parallel.weights.model_weights import DrawnWeights, ModelWeights
from torsh_distributed.plan import Plan
from torsh_distributed.plan.compatibility.axis_rules import shards_params, splits_model
from torsh_distributed.plan.compatibility.recovery_rules import offloads_shards, pages_model
from torsh_distributed.plan.compatibility.server_rules import is_served
from torsh_distributed.plan.sections.training import PrecisionConfig

StrategyKind = Literal["alone", "composed", "paged", "replicated", "sharded_optimizer", "sharded"]


def strategy_for(
    model: nn.Module,
    plan: Plan,
    *,
    param_init_fn: ParamInit | None = None,
    weights: ModelWeights | None = None,
    example: tuple[Any, ...] | Mapping[str, Any] | None = None,
) -> Strategy:
    """Spread `model` over the world as the plan says; every rank calls this, with a plan resolved for the world.

    The plan is valid for the world (`Plan.validate`): what does not go together has been refused there.
    `param_init_fn` fills the modules of a model on the meta device that have no `reset_parameters()`, or `weights` all
    of it; `example` is a microbatch of inputs, for `pipeline.balance = "time"`.
    """
    kind = strategy_kind(plan)
    if weights is None and (kind == "composed" or plan.mesh.ep > 1):
        weights = _drawn(model, plan, param_init_fn)
    if kind == "composed":
        # Here, not above: it takes a second to import, and most plans do not ask for it.
        from torsh_distributed.parallel.composed import composed_strategy

        if is_on_meta(model) and weights is None:
            Materializer(model, process_group.device(), init_fn=param_init_fn, seed=plan.training.seed).make(model)
        return composed_strategy(model, plan, example=example, weights=weights)
    _prepare_layers(model, plan)
    if weights is not None and plan.mesh.ep > 1:
        load_spread(model, plan, weights)
    elif weights is not None and kind != "sharded":
        _load_whole(model, weights)
    elif is_on_meta(model) and kind != "sharded":
        materializer = Materializer(model, process_group.device(), init_fn=param_init_fn, seed=plan.training.seed)
        materializer.make(model)
    with_experts = expert_strategy(model, plan)
    if with_experts is not None:
        return with_experts
    if kind == "alone":
        return LoneReplicas(model)
    if kind == "paged":
        # Here, not above, as whatever few plans ask for.
        from torsh_distributed.parallel.offload.state_offload import paged_strategy

        return paged_strategy(model, plan)
    if kind == "replicated":
        # Others write into a replica during a divided update: if one of them dies in it, the replica is neither the
        # old nor the new one.
        divides = not plan.elastic.enabled
        return DataParallel(model, plan.ddp, plan.distributed, divides_update=divides, **gradient_options(plan))
    device = process_group.device() if is_on_meta(model) else check_one_device(model)
    mesh = Mesh(plan.mesh, device_type=device.type)
    if kind == "sharded_optimizer":
        return ShardedOptimizer(model, plan.ddp, plan.distributed, mesh=mesh, **gradient_options(plan))
    if not offloads_shards(plan):
        return Sharded(_sharded_module(model, plan, mesh, param_init_fn=param_init_fn, weights=weights))
    from torsh_distributed.parallel.offload.shards.offloaded_shards import shard_keeper
    from torsh_distributed.parallel.offload.shards.shard_offload_strategy import ShardedOffload

    keeper = shard_keeper(plan.offload, device)
    wrapped = _sharded_module(model, plan, mesh, param_init_fn=param_init_fn, weights=weights, keeper=keeper)
    return ShardedOffload(wrapped, keeper)


def _sharded_module(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    param_init_fn: ParamInit | None,
    weights: ModelWeights | None,
    keeper: ShardKeeper | None = None,
) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        model,
        plan.fsdp,
        mesh=mesh,
        precision=_accumulating(plan, is_offloaded=keeper is not None),
        param_init_fn=param_init_fn,
        weights=weights,
        seed=plan.training.seed,
        broadcast_buffers=plan.ddp.broadcast_buffers,
        compression=plan.compress,
        keeper=keeper,
    )


def _accumulating(plan: Plan, *, is_offloaded: bool) -> PrecisionConfig:
    """The formats of shards.

    FSDP2 adds up the passes of a step in the format in which it then reduces: 16 bits would lose the smaller ones.
    Under offload every pass is reduced, into fp32.
    """
    precision = plan.precision
    is_low = precision.dtype != "fp32" and precision.reduce_dtype == "same"
    if is_low and plan.training.gradient_accumulation > 1 and not is_offloaded:
        return precision.replace(reduce_dtype="fp32")
    return precision


def _drawn(model: nn.Module, plan: Plan, init_fn: ParamInit | None) -> DrawnWeights | None:
    """Initial values for a model that is split before it has any; None if it has some, or must be run to be split."""
    must_run = plan.mesh.pp > 1 and plan.pipeline.balance == "time"
    if must_run or not all(param.is_meta for param in model.parameters()):
        return None
    return DrawnWeights(model, init_fn=init_fn, seed=plan.training.seed)


def _load_whole(model: nn.Module, weights: ModelWeights) -> None:
    """For ranks that begin with the whole model: the first one reads it and replicas take it from there."""
    weights.allocate(model)
    weights.load(model, names=None if process_group.rank() == 0 else ())


def strategy_kind(plan: Plan) -> StrategyKind:
    """The kind of strategy for a valid, resolved plan. A model with experts may get one of its own."""
    if is_served(plan):
        return "alone"
    if splits_model(plan):
        return "composed"
    if pages_model(plan):
        return "paged"
    if plan.mesh.shard == 1:
        return "replicated"
    return "sharded" if shards_params(plan) else "sharded_optimizer"


def _prepare_layers(model: nn.Module, plan: Plan) -> None:
    """Before sharding: compiled and recomputed layers are inside a piece, whose parameters are gathered by then."""
    classes, names = plan.fsdp.wrap_classes, plan.fsdp.wrap_names
    layers = matching(model, classes=classes, names=names, section="fsdp.wrap") if classes or names else None
    compile_and_checkpoint(model, plan.compile, plan.activation, layers=layers, group=dist.group.WORLD)
    if plan.activation.disk_dir is not None:
        from torsh_distributed.parallel.offload.disk_activations import activations_to_disk

        activations_to_disk(model, plan.activation)
