"""Which strategy a plan asks for."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.activation import checkpoint_activations
from torsh_distributed.parallel.data.data_strategy import DataParallel, gradient_options, refuse_gradient_options
from torsh_distributed.parallel.expert.choose import expert_strategy
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.models.materialize import Materializer, ParamInit, is_on_meta
from torsh_distributed.parallel.models.wrapping import matching
from torsh_distributed.parallel.offload.choose import moves_params_or_grads, paged_strategy
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
from torsh_distributed.parallel.sharded.sharded_strategy import Sharded
from torsh_distributed.parallel.sharded.zero1 import ShardedOptimizer
from torsh_distributed.parallel.strategy import Strategy, check_one_device
from torsh_distributed.plan import Plan


def strategy_for(
    model: nn.Module,
    plan: Plan,
    *,
    param_init_fn: ParamInit | None = None,
    example: tuple[Any, ...] | None = None,
) -> Strategy:
    """Spread `model` over the world as the plan says; every rank calls this, with a plan resolved for the world.

    `param_init_fn` fills the modules of a model on the meta device that have no `reset_parameters()`; `example` is a
    microbatch of inputs, for `pipeline.balance = "time"`.
    """
    mesh = plan.mesh
    if mesh.tp * mesh.pp * mesh.cp > 1 or (mesh.shard > 1 and mesh.ep > 1):
        # Here, not above: it takes a second to import, and most plans do not ask for it.
        from torsh_distributed.parallel.composed import composed_strategy

        if is_on_meta(model):
            Materializer(model, process_group.device(), init_fn=param_init_fn, seed=plan.training.seed).make(model)
        return composed_strategy(model, plan, example=example)
    _checkpoint(model, plan)
    shards_params = plan.mesh.shard > 1 and plan.fsdp.strategy != "shard_optimizer"
    if is_on_meta(model) and not shards_params:
        materializer = Materializer(model, process_group.device(), init_fn=param_init_fn, seed=plan.training.seed)
        materializer.make(model)
    with_experts = expert_strategy(model, plan)
    if with_experts is not None:
        refuse_gradient_options(plan, why="the model has experts, whose gradients travel by another way")
        return with_experts
    if moves_params_or_grads(plan):
        refuse_gradient_options(plan, why="offload.params and offload.grads send gradients as they are")
        return paged_strategy(model, plan)
    if plan.mesh.shard == 1:
        return DataParallel(model, plan.ddp, plan.distributed, **gradient_options(plan))
    device = process_group.device() if is_on_meta(model) else check_one_device(model)
    laid_out = Mesh(mesh, device_type=device.type)
    if not shards_params:
        return ShardedOptimizer(model, plan.ddp, plan.distributed, mesh=laid_out, **gradient_options(plan))
    _refuse_bucket_settings(plan)
    wrapped = FullyShardedDataParallel(
        model,
        plan.fsdp,
        mesh=laid_out,
        precision=plan.precision,
        param_init_fn=param_init_fn,
        seed=plan.training.seed,
        broadcast_buffers=plan.ddp.broadcast_buffers,
        compression=plan.compress,
    )
    return Sharded(wrapped)


def _checkpoint(model: nn.Module, plan: Plan) -> None:
    """Before anything else: recomputing happens inside a piece, whose parameters are gathered then."""
    classes, names = plan.fsdp.wrap_classes, plan.fsdp.wrap_names
    layers = matching(model, classes=classes, names=names, section="fsdp.wrap") if classes or names else None
    checkpoint_activations(model, plan.activation, layers=layers, group=dist.group.WORLD)


def _refuse_bucket_settings(plan: Plan) -> None:
    """How buckets are summed is for replicas: FSDP2 sends its pieces by the backend alone."""
    asked = plan.distributed
    wanted = [
        name
        for name, is_wanted in (
            ("algorithm", asked.algorithm != "backend"),
            ("deterministic", asked.deterministic),
            ("rate_limit_gbps", asked.rate_limit_gbps is not None),
        )
        if is_wanted
    ]
    if wanted:
        raise ConfigurationError(
            f"distributed.{wanted[0]} has no effect on sharded parameters",
            hint="leave it out, or shard the optimizer only: fsdp.strategy = shard_optimizer",
            equation=plan.mesh.equation,
        )
