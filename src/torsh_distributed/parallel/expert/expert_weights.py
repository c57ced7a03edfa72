"""Weights of a model whose experts are spread: a rank reads its own experts, and what is not spread."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.parallel.expert.choose import check_experts
from torsh_distributed.parallel.expert.spreading import spread_on_meta
from torsh_distributed.parallel.expert.stacked_experts import cut_stack, expert_runs, spread_params
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.weights.held_parts import HeldParts, Rows
from torsh_distributed.parallel.weights.model_weights import ModelWeights
from torsh_distributed.plan import Plan


class ExpertParts(HeldParts):
    """The experts along `ep`; construct it once they are spread. Everything else is held whole or as shards."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = {name: owner for name, (owner, _) in spread_params(model).items()}

    @override
    def runs(self, name: str, shape: Sequence[int]) -> Rows | None:
        owner = self._owners.get(name)
        if owner is None:
            return super().runs(name, shape)
        return [(run.whole, run.whole + run.length) for run in expert_runs(owner)]

    @override
    def piece(self, name: str, whole: Tensor) -> Tensor:
        owner = self._owners.get(name)
        return whole if owner is None else cut_stack(whole, owner)


def load_spread(model: nn.Module, plan: Plan, weights: ModelWeights) -> None:
    """Spread the experts of a model on meta over `mesh.ep`, then fill this rank's; every rank calls this.

    Raises ConfigurationError if the plan does not fit the model, before anything is changed.
    """
    check_experts(model, plan)
    spread_on_meta(model, Mesh(plan.mesh, device_type=weights.device.type))
    weights.allocate(model)
    weights.load(model, ExpertParts(model))
