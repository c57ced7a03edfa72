"""Experts of a DeepSpeed model over ranks: whether they can be spread, and their stacks in an optimizer."""

from __future__ import annotations

import logging

from torch import nn
from torch.optim import Optimizer

from torsh_distributed.comm.groups import process_group
from torsh_distributed.migrate.deepspeed.moe.expert_modules import ExpertModules
from torsh_distributed.migrate.deepspeed.moe.moe_layer import MoE
from torsh_distributed.migrate.deepspeed.ops import FusedLion, MuonWithAuxAdam
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings
from torsh_distributed.parallel.whole_tensors.optimizer_needs import known_needs

_log = logging.getLogger(__name__)


def spread_degree(model: nn.Module, optimizer: Optimizer, settings: RunSettings) -> int:
    """Stack the experts of `ep_size > 1`, and say over how many ranks a plan spreads them; 1 if all stay on every rank.

    Every rank calls this before the model is spread. Stacks replace the experts' parameters in the optimizer. They are
    made at any world size, so that a checkpoint can be read at any other.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE) and module.ep_size > 1]
    if not layers or settings.stage == 3:  # stage 3 shards experts like all other parameters
        return 1
    degree = max(layer.ep_size for layer in layers)
    reason = _why_not(layers, degree, optimizer, settings)
    if reason is not None:
        if process_group.rank() == 0:
            _log.warning(
                "MoE(ep_size=%d): results are the same, but every rank keeps all experts in memory: %s", degree, reason
            )
        return 1
    for layer in layers:
        _stack(layer.deepspeed_moe.experts, optimizer)
    return degree if process_group.world_size() % degree == 0 else 1


def _why_not(layers: list[MoE], degree: int, optimizer: Optimizer, settings: RunSettings) -> str | None:
    if any(layer.ep_size != degree for layer in layers):
        return "layers differ in ep_size"
    if known_needs(optimizer) != "elements" and not isinstance(optimizer, FusedLion):
        return f"{type(optimizer).__name__} needs whole matrices"
    if isinstance(optimizer, MuonWithAuxAdam):
        return "Muon needs whole matrices"
    if settings.reduce_dtype != "same" or settings.has_fp32_shards:
        return "gradients of spread experts are added up in their own format"
    plan = settings.plan
    if plan is not None and (plan.compress.method != "none" or plan.fsdp.strategy == "hybrid_shard"):
        return "they are not combined with compressed gradients or groups of shards"
    for layer in layers:
        experts = layer.deepspeed_moe.experts
        found = experts.why_not_stacked() or _why_not_in(experts, optimizer)
        if found is not None:
            return found
    return None


def _why_not_in(experts: ExpertModules, optimizer: Optimizer) -> str | None:
    """Why the optimizer's groups have no place for stacks of these experts."""
    place = {id(param): number for number, group in enumerate(optimizer.param_groups) for param in group["params"]}
    by_expert = [
        {name: place.get(id(param)) for name, param in expert.named_parameters()}
        for expert in experts.deepspeed_experts
    ]
    if any(one != by_expert[0] for one in by_expert):
        return "the optimizer has the experts of a layer in different groups"
    if any(param in optimizer.state for param in experts.parameters()):
        return "the optimizer has state of single experts"
    return None


def _stack(experts: ExpertModules, optimizer: Optimizer) -> None:
    """Stack a layer's experts; the optimizer gets a stack in the place of the first of its parts."""
    for stack, parts in experts.stack():
        gone = {id(part) for part in parts}
        for group in optimizer.param_groups:
            params = group["params"]
            first = next((number for number, param in enumerate(params) if id(param) in gone), None)
            if first is not None:
                rest = [param for param in params[first:] if id(param) not in gone]
                group["params"] = [*params[:first], stack, *rest]


def mark_experts(model: nn.Module) -> None:
    """Mark the experts' parameters again, after others have taken their place."""
    for module in model.modules():
        if isinstance(module, ExpertModules):
            module.mark()
