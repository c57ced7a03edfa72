"""Combines a plan's axes in the right order: tensor, compiled and recomputed layers, shards or replicas, pipeline."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torsh_distributed.comm.collectives.objects import all_gather_object, broadcast_object
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.activation import compile_and_checkpoint
from torsh_distributed.parallel.composed.pipeline_strategy import PipelineStages
from torsh_distributed.parallel.composed.split_check import SplitCheck, sequence_edges
from torsh_distributed.parallel.composed.split_model import Composed, Context, SequenceContext
from torsh_distributed.parallel.composed.split_state import SplitWeights
from torsh_distributed.parallel.composed.stage_shards import StageAverage, StageShards, refuse_shared_on_one_rank
from torsh_distributed.parallel.context import ContextParallel
from torsh_distributed.parallel.context.context_check import AttentionFacts, check_context
from torsh_distributed.parallel.context.context_parallel import require_positions
from torsh_distributed.parallel.context.interface_context import InterfaceContext
from torsh_distributed.parallel.data.data_strategy import DataParallel, gradient_options
from torsh_distributed.parallel.data.replicated_params import broadcast_from_first
from torsh_distributed.parallel.expert import ExpertDataParallel, moe_layers
from torsh_distributed.parallel.expert.choose import check_experts
from torsh_distributed.parallel.expert.placed_experts import spread_names
from torsh_distributed.parallel.expert.spreading import (
    StagedAuxiliaryLoss,
    expert_sharding,
    spread_experts,
    spread_on_meta,
)
from torsh_distributed.parallel.mesh.layout import GRADIENT_AXES, MESH_ORDER
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.models.anatomy import is_from_transformers
from torsh_distributed.parallel.models.example_inputs import LENGTH, example_inputs, passing_values
from torsh_distributed.parallel.pipeline import PipelineParallel, StagePlan, plan_stages
from torsh_distributed.parallel.pipeline.runtime import Wrap
from torsh_distributed.parallel.pipeline.schedule import planned_order, stage_owners, stages_of_rank
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
from torsh_distributed.parallel.sharded.sharded_strategy import Sharded
from torsh_distributed.parallel.strategy import Strategy, check_one_device
from torsh_distributed.parallel.tensor import find_tensor_plan, tensor_parallel, tensor_parallel_context
from torsh_distributed.parallel.weights.model_weights import ModelWeights
from torsh_distributed.plan import Plan

_log = logging.getLogger(__name__)

Example = tuple[Any, ...] | Mapping[str, Any] | None
"""A microbatch of inputs, in the order of forward's arguments or by their names."""


def composed_strategy(
    model: nn.Module,
    plan: Plan,
    *,
    example: Example = None,
    weights: ModelWeights | None = None,
) -> Strategy:
    """Spread `model` over a mesh with tensor, pipeline or context axes, or shards of experts; every rank calls this.

    The plan is valid for the world. What the model alone can show is refused first, equally on every rank, before
    anything is changed or sent.
    `example` is a microbatch of inputs to measure layers on, for `pipeline.balance = "time"`. `weights` fill a model
    on the meta device: each rank gets its stages, its pieces of split layers, or its shards of these.
    """
    if weights is not None and plan.mesh.pp > 1 and plan.pipeline.balance == "time":
        raise ConfigurationError(
            'pipeline.balance = "time" measures layers, which a model without weights cannot run',
            hint='balance by "auto" or "parameters", or build the model outside the meta device',
        )
    check_experts(model, plan)
    tensors = None
    if plan.mesh.tp > 1:
        spread = spread_names(model, plan.mesh.ep)
        tensors = find_tensor_plan(model, tp=plan.mesh.tp, config=plan.tensor, spread=spread)
        tensors = tensors.for_compiled_layers() if plan.compile.enabled else tensors
    stages, facts, weights = _looked_at(model, plan, example, weights)
    device = check_one_device(model) if weights is None else weights.device
    mesh = Mesh(plan.mesh, device_type=device.type)
    world = dist.group.WORLD
    assert world is not None, "parallelize() checks that the group is up"
    if weights is None:
        broadcast_from_first([*model.parameters(), *model.buffers()], world)
    if stages is not None:
        stages.drop_others(_mine(plan, mesh))
    splitting: Context = nullcontext
    if tensors is not None:
        is_whole = weights is None and stages is None
        check = _split_check(model, plan, example) if is_whole else None
        can_compare = is_whole and all(all_gather_object(check is not None, group=mesh.group("tp")))
        tensor_parallel(model, mesh.slice("tp"), plan=tensors)
        splitting = partial(tensor_parallel_context, tensors)
        if check is not None and can_compare:  # all of them or none: they run the model together
            check.compare(tensors, mesh.group("tp"))
    if weights is None:
        spread_experts(model, mesh)
    else:
        here = None if stages is None else {name for index in _mine(plan, mesh) for name in stages.names(index)}
        spread_on_meta(model, mesh, here)
        if stages is not None or plan.mesh.shard == 1:  # else the shards get them
            weights.allocate(model, here)
            weights.load(model, SplitWeights(model, mesh), names=here)
    # Ranks of one stage must recompute the same layers; other stages have other layers.
    peers = mesh.group(*(axis for axis in MESH_ORDER if axis != "pp"))
    compile_and_checkpoint(model, plan.compile, plan.activation, group=peers)
    if stages is not None:
        return _pipelined(model, plan, mesh, stages, splitting, facts, device)
    context = _context(model, model, plan, mesh, facts)
    contexts = (splitting,) if context is None else (splitting, context.attending)
    inner = _inner(model, plan, mesh, weights)
    return Composed(model, mesh, inner=inner, contexts=contexts, context=context, device=device)


def _looked_at(
    model: nn.Module, plan: Plan, example: Example, weights: ModelWeights | None
) -> tuple[StagePlan | None, AttentionFacts | None, ModelWeights | None]:
    """The model's stages, what is known about its attention, and the weights that are still to be read.

    Both are found by a run, which needs values: those that pass through a model on meta, or, where its forward reads
    more than its modules are called with, all of its weights.
    """
    if weights is None or not (is_from_transformers(model) or example is not None):
        return *_look(model, plan, example), weights
    try:
        with passing_values(model, weights.device):
            return *_look(model, plan, example), weights
    except Exception as error:
        if isinstance(error, ConfigurationError) and error.__cause__ is None:
            raise  # it is the model, not its lack of values
        _log.warning("%s is read whole before it is split: %s", type(model).__name__, error)
    weights.allocate(model)
    weights.load(model)
    return *_look(model, plan, example), None


def _look(model: nn.Module, plan: Plan, example: Example) -> tuple[StagePlan | None, AttentionFacts | None]:
    stages = _stages(model, plan, example) if plan.mesh.pp > 1 else None
    return stages, _attention_facts(model, plan) if plan.mesh.cp > 1 else None


def _split_check(model: nn.Module, plan: Plan, example: Example) -> SplitCheck | None:
    """What the whole model computes on an example; None if none is given and none can be made for it."""
    if example is not None:
        return SplitCheck(model, example_inputs(model, example))
    if plan.tensor.sequence_parallel and LENGTH % plan.mesh.tp != 0:
        return None
    try:
        return SplitCheck(model, example_inputs(model))
    except Exception as error:
        # Its own code may raise anything at inputs that are not all it needs.
        _log.info("%s is split without being compared with the whole model: %s", type(model).__name__, error)
        return None


def _attention_facts(model: nn.Module, plan: Plan) -> AttentionFacts | None:
    """What is known about the attention of a model of transformers; refuses models that cannot run on parts."""
    if is_from_transformers(model):
        return check_context(model, cp=plan.mesh.cp, tp=plan.mesh.tp, form=plan.context.form)
    require_positions(model, cp=plan.mesh.cp)
    return None


def _context(
    model: nn.Module, part: nn.Module, plan: Plan, mesh: Mesh, facts: AttentionFacts | None
) -> SequenceContext | None:
    """Splits sequences for `part`, the modules of `model` that are on this rank."""
    if plan.mesh.cp == 1:
        return None
    if facts is not None:
        return InterfaceContext(model, mesh.group("cp"), form=plan.context.form, facts=facts)
    return ContextParallel(part, mesh.group("cp"), is_part=part is not model, form=plan.context.form)


def _stages(model: nn.Module, plan: Plan, example: Example) -> StagePlan:
    """The split into stages; checks that there is an order in which they can run."""
    stages = plan_stages(model, plan.pipeline, plan.mesh.pp, example=example, agree=_as_on_first_rank)
    planned_order(plan.pipeline, plan.mesh.pp)
    if plan.mesh.shard > 1:
        refuse_shared_on_one_rank(stages, stage_owners(plan.pipeline, plan.mesh.pp))
    return stages


def _as_on_first_rank(costs: list[float]) -> list[float]:
    """Measured times differ; all ranks split the model where the first one would."""
    return list(broadcast_object(costs, 0))


def _mine(plan: Plan, mesh: Mesh) -> tuple[int, ...]:
    return stages_of_rank(
        plan.pipeline.schedule,
        mesh.coordinates["pp"],
        num_ranks=plan.mesh.pp,
        num_stages=plan.mesh.pp * plan.pipeline.stages_per_rank,
    )


def _inner(model: nn.Module, plan: Plan, mesh: Mesh, weights: ModelWeights | None) -> Strategy | None:
    """Replicas or shards over the axes along which ranks see different data; None if there is only one such rank."""
    if plan.mesh.shard > 1:
        return Sharded(
            FullyShardedDataParallel(
                model,
                plan.fsdp,
                mesh=mesh,
                precision=plan.precision,
                seed=plan.training.seed,
                broadcast_buffers=plan.ddp.broadcast_buffers,
                compression=plan.compress,
                separate=expert_sharding(model, mesh),
                weights=weights,
                parts=None if weights is None else SplitWeights(model, mesh),
            )
        )
    if mesh.layout.degree(*GRADIENT_AXES) == 1:
        return None
    if moe_layers(model) or spread_names(model, plan.mesh.ep):
        return ExpertDataParallel(model, plan.ddp, plan.distributed, mesh=mesh)
    group = mesh.group(*GRADIENT_AXES)
    return DataParallel(model, plan.ddp, plan.distributed, group=group, **gradient_options(plan))


def _pipelined(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    stages: StagePlan,
    splitting: Context,
    facts: AttentionFacts | None,
    device: torch.device,
) -> PipelineStages:
    wraps: list[Wrap] = []
    if plan.mesh.tp > 1 and plan.tensor.sequence_parallel:
        wraps.append(sequence_edges(stages, mesh.slice("tp")))
    carried = StagedAuxiliaryLoss(len(stages.stages)) if moe_layers(model) else None
    if carried is not None:
        wraps.append(carried.wrap_stage)
    shards = StageShards(model, plan, mesh) if plan.mesh.shard > 1 else None
    if shards is not None:
        wraps.append(shards.shard)
    pipe = PipelineParallel(
        stages, plan.pipeline, group=mesh.group("pp"), wrap=partial(_wrapped, wraps), context=splitting
    )
    context = _context(model, nn.ModuleList(pipe.built.values()), plan, mesh, facts)
    if isinstance(context, InterfaceContext):
        context.rows_from(stages.microbatches.first_row)
    return PipelineStages(
        pipe,
        model,
        mesh,
        average=StageAverage(pipe.module, plan, mesh, device),
        shards=shards,
        context=context,
        adding=carried.wrap_loss if carried is not None else None,
        device=device,
    )


def _wrapped(wraps: Sequence[Wrap], index: int, stage: nn.Module) -> nn.Module:
    for wrap in wraps:
        stage = wrap(index, stage)
    return stage
