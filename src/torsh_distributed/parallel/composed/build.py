"""Puts a plan's axes together in the right order: tensor, activation checkpointing, shards or replicas, pipeline."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.activation import checkpoint_activations
from torsh_distributed.parallel.composed.edges import sequence_edges
from torsh_distributed.parallel.composed.pipelined import PipelineStages
from torsh_distributed.parallel.composed.strategy import Composed, Context
from torsh_distributed.parallel.context import ContextParallel
from torsh_distributed.parallel.data import DataParallel, refuse_gradient_options
from torsh_distributed.parallel.expert import ExpertDataParallel, moe_layers
from torsh_distributed.parallel.expert.carried import CarriedLoss
from torsh_distributed.parallel.expert.choice import check_experts
from torsh_distributed.parallel.expert.spreading import experts_apart, spread_experts
from torsh_distributed.parallel.layout import GRADIENT_AXES
from torsh_distributed.parallel.mesh import Mesh
from torsh_distributed.parallel.pipeline import PipelineParallel, StagePlan, plan_stages
from torsh_distributed.parallel.pipeline.schedule import planned_order, stages_of_rank
from torsh_distributed.parallel.replicas import broadcast_from_first
from torsh_distributed.parallel.sharded import FullyShardedDataParallel
from torsh_distributed.parallel.sharded_strategy import Sharded
from torsh_distributed.parallel.strategy import Strategy, check_one_device
from torsh_distributed.parallel.tensor import find_tensor_plan, tensor_parallel, tensor_parallel_context
from torsh_distributed.plan import Plan


def is_composed(plan: Plan) -> bool:
    """Whether the plan splits the model itself or its sequences, or shards what differs between ranks."""
    mesh = plan.mesh
    return mesh.tp > 1 or mesh.pp > 1 or mesh.cp > 1 or (mesh.shard > 1 and mesh.ep > 1)


def composed_strategy(model: nn.Module, plan: Plan) -> Strategy:
    """Spread `model` over a mesh with tensor, pipeline or context axes, or shards of experts; every rank calls this.

    Everything that can be refused is refused first, on every rank alike: nothing has been changed or sent then.
    """
    _refuse(plan)
    if check_experts(model, plan):
        why = "the model has experts, whose gradients travel by another way"
        refuse_gradient_options(plan, why=why, reduces=plan.mesh.shard > 1)
    tensors = find_tensor_plan(model, tp=plan.mesh.tp, config=plan.tensor) if plan.mesh.tp > 1 else None
    stages = plan_stages(model, plan.pipeline, plan.mesh.pp) if plan.mesh.pp > 1 else None
    if stages is not None:
        planned_order(plan.pipeline, plan.mesh.pp)
    device = check_one_device(model)
    mesh = Mesh(plan.mesh, device_type=device.type)
    world = dist.group.WORLD
    assert world is not None, "parallelize() checks that the group is up"
    broadcast_from_first([*model.parameters(), *model.buffers()], world)
    if stages is not None:
        stages.drop_others(_mine(plan, mesh))
    contexts: tuple[Context, ...] = ()
    if tensors is not None:
        tensor_parallel(model, mesh.slice("tp"), plan=tensors)
        contexts = (partial(tensor_parallel_context, tensors),)
    spread_experts(model, mesh)
    # Ranks of one stage choose alike what they recompute; other stages are other layers.
    peers = mesh.group(*(axis for axis in mesh.layout.order if axis != "pp"))
    checkpoint_activations(model, plan.activation, group=peers)
    context = ContextParallel(model, mesh.group("cp")) if plan.mesh.cp > 1 else None
    if context is not None:
        contexts += (context.attending,)
    if stages is not None:
        return _pipelined(model, plan, mesh, stages, contexts, device)
    inner = _inner(model, plan, mesh)
    return Composed(
        model, mesh, inner=inner, contexts=contexts, take_part=context.take if context else None, device=device
    )


def _mine(plan: Plan, mesh: Mesh) -> tuple[int, ...]:
    return stages_of_rank(
        plan.pipeline.schedule,
        mesh.coordinates["pp"],
        num_ranks=plan.mesh.pp,
        num_stages=plan.mesh.pp * plan.pipeline.stages_per_rank,
    )


def _inner(model: nn.Module, plan: Plan, mesh: Mesh) -> Strategy | None:
    """Replicas or shards over the axes along which ranks see different data; None where there is one such rank."""
    if plan.mesh.shard > 1:
        return Sharded(
            FullyShardedDataParallel(
                model,
                plan.fsdp,
                mesh=mesh,
                precision=plan.precision,
                broadcast_buffers=plan.ddp.broadcast_buffers,
                apart=experts_apart(model, mesh),
            )
        )
    if mesh.layout.degree(*GRADIENT_AXES) == 1:
        return None
    if moe_layers(model):
        return ExpertDataParallel(model, plan.ddp, plan.distributed, mesh=mesh)
    return DataParallel(model, plan.ddp, plan.distributed, group=mesh.group(*GRADIENT_AXES))


def _pipelined(
    model: nn.Module, plan: Plan, mesh: Mesh, stages: StagePlan, contexts: tuple[Context, ...], device: torch.device
) -> PipelineStages:
    group = mesh.group("pp")
    context = contexts[0] if contexts else nullcontext
    is_split = plan.mesh.tp > 1 and plan.tensor.sequence_parallel
    wrap = sequence_edges(stages, mesh.slice("tp")) if is_split else None
    carried = CarriedLoss(len(stages.stages)) if moe_layers(model) else None
    if carried is not None:
        wrap = carried.around(wrap)
    return PipelineStages(
        lambda loss_fn: PipelineParallel(
            stages,
            plan.pipeline,
            group=group,
            loss_fn=carried.adding(loss_fn) if carried else loss_fn,
            wrap=wrap,
            context=context,
        ),
        model,
        mesh,
        device=device,
    )


def _refuse(plan: Plan) -> None:
    """What these axes do not go together with yet."""
    split = [axis for axis in ("ep", "tp", "pp", "cp") if plan.mesh.degrees[axis] > 1]
    named = " × ".join(f"{axis} {plan.mesh.degrees[axis]}" for axis in split)
    clashes = [
        ("mesh.shard with mesh.pp", plan.mesh.shard > 1 and plan.mesh.pp > 1, "use mesh.dp in place of mesh.shard"),
        (
            "fsdp.strategy = shard_optimizer",
            plan.mesh.shard > 1 and plan.fsdp.strategy == "shard_optimizer",
            "shard parameters too: fsdp.strategy = full_shard",
        ),
        ("offload", plan.offload.enabled, "set offload.enabled = false"),
        ("compress with mesh.pp", plan.compress.method != "none" and plan.mesh.pp > 1, "set compress.method = none"),
        (
            "distributed.algorithm, deterministic or rate_limit_gbps with mesh.pp",
            plan.mesh.pp > 1
            and (
                plan.distributed.algorithm != "backend"
                or plan.distributed.deterministic
                or plan.distributed.rate_limit_gbps is not None
            ),
            "leave them out",
        ),
        ("precision.dtype = fp16 with mesh.pp", plan.mesh.pp > 1 and plan.precision.dtype == "fp16", "use bf16"),
        ('pipeline.balance = "time"', plan.mesh.pp > 1 and plan.pipeline.balance == "time", 'use balance = "auto"'),
        ("mesh.pp with mesh.cp", plan.mesh.pp > 1 and plan.mesh.cp > 1, "set one of them to 1"),
    ]
    for what, is_wanted, hint in clashes:
        if is_wanted:
            raise ConfigurationError(f"{what} does not go together with {named} in this version", hint=hint)
