"""`deepspeed.moe.utils`: which parameters are those of experts, and groups of an optimizer that tell them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from torsh_distributed.migrate.deepspeed.surface.moe_layer import MoE


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Whether a model has such layers, and the number of experts in the first."""
    counts = [one.num_experts for one in module.modules() if isinstance(one, MoE)]
    return bool(counts), counts[0] if counts else 0


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter is reduced apart from the others. Ours are not: every rank has all experts."""
    return not getattr(param, "allreduce", True)


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that are reduced over all ranks, and the others."""
    given = list(params)
    return [one for one in given if not is_moe_param(one)], [one for one in given if is_moe_param(one)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """Groups of an optimizer in which experts that are reduced apart have groups of their own, marked with `moe`."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    shared, apart = [], []
    for group in groups:
        ours, experts = split_params_into_shared_and_expert_params(group["params"])
        shared.append({**group, "params": ours})
        for name in dict.fromkeys(getattr(one, "group_name", "experts") for one in experts):
            found = [one for one in experts if getattr(one, "group_name", "experts") == name]
            apart.append({**group, "name": name, "moe": True, "params": found})
    return [*shared, *apart]
