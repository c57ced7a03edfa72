"""Counts the parameters of a model: of each block, and of what is before and after the blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

from torsh_distributed.parallel.models.structure import expert_modules
from torsh_distributed.parallel.tensor.planning.tensor_plan import TensorPlan
from torsh_distributed.planner.model.model_profile import ParamCounts, ParamKind

BEFORE, AFTER = "before the blocks", "after the blocks"


def param_counts(
    model: nn.Module, layers: Mapping[str, nn.Module], called_before: set[str], tensors: TensorPlan | None
) -> dict[str, ParamCounts]:
    """The parameters of each block by its name, and of what is around them; a shared one belongs to the first."""
    split = {row.name for row in (() if tensors is None else tensors.modules) if row.cut is not None}
    stacked = set(expert_modules(model))
    counts: dict[str, Counter[ParamKind]] = {name: Counter() for name in (*layers, BEFORE, AFTER)}
    largest, tensors_of = dict.fromkeys(counts, 0), dict.fromkeys(counts, 0)
    for name, param in model.named_parameters():
        owner = next((one for one in layers if name.startswith(f"{one}.")), None)
        module = name.rpartition(".")[0]
        place = owner or (BEFORE if module in called_before else AFTER)
        kind = ParamKind(
            param.element_size(),
            is_trained=param.requires_grad,
            is_split=name in split or module in split,
            is_expert=any(module == one or module.startswith(f"{one}.") for one in stacked),
        )
        counts[place][kind] += param.numel()
        largest[place] = max(largest[place], param.numel())
        tensors_of[place] += param.requires_grad
    return {place: ParamCounts(dict(found), largest[place], tensors_of[place]) for place, found in counts.items()}


def tied_numel(model: nn.Module, layers: Mapping[str, nn.Module], before: set[str], after: set[str]) -> int:
    """Elements of parameters that are used before the blocks and after them."""
    owners: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(param), set()).add(name.rpartition(".")[0])
    sizes = {id(param): param.numel() for param in model.parameters()}
    return sum(
        sizes[one] for one, names in owners.items() if names & before and names & after and not names & {*layers}
    )


def num_experts(model: nn.Module) -> int:
    """Experts of a layer; 0 for a model without."""
    found = [
        param.shape[0]
        for name in expert_modules(model)
        for param in model.get_submodule(name).parameters(recurse=False)
        if param.dim() == 3
    ]
    children = [len(list(model.get_submodule(name).children())) for name in expert_modules(model)]
    return max([*found, *children], default=0)
