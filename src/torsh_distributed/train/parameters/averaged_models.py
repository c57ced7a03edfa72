"""torch's AveragedModel, made of a whole model and updated from one that ranks have split: refused with what to do."""

from __future__ import annotations

import functools
from itertools import zip_longest
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.plan import Plan

_SPLIT = WeakKeyDictionary[nn.Module, str]()
"""Models of which a rank holds pieces, or not all, and the setting that splits them."""


def explain_averages(strategy: Strategy, plan: Plan) -> None:
    """Let AveragedModel say that the strategy's model is split, where torch fails or averages unlike parameters."""
    splits = [f"mesh.{name}" for name in ("shard", "tp", "pp", "ep") if plan.mesh.degrees[name] > 1]
    splits += ["offload"] if plan.offload.enabled else []
    for model in (strategy.model, strategy.unwrapped, strategy.whole_model):
        _SPLIT.pop(model, None)
        if splits:
            _SPLIT[model] = " and ".join(splits)
    before = AveragedModel.update_parameters
    if not splits or hasattr(before, "is_explained"):  # others may have wrapped it too, and would not say this
        return

    @functools.wraps(before)
    def update_parameters(averaged: AveragedModel, model: nn.Module) -> None:
        if model in _SPLIT and not _fits(averaged, model):
            raise InvalidArgument(
                f"AveragedModel has other parameters than the model, of which rank {process_group.rank()} holds a part"
                f" under {_SPLIT[model]}",
                hint="average into a copy of the model from before parallelize(): `with engine.whole_weights() as"
                " weights, torch.no_grad():`, and for each name and param of the copy"
                " param.lerp_(weights[name], 1 / (number_of_updates + 1))",
            )
        before(averaged, model)

    update_parameters.is_explained = True  # type: ignore[attr-defined]  # a function takes any name
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign, assignment]  # torch has no hook


def _fits(averaged: AveragedModel, model: nn.Module) -> bool:
    """Whether the one was made of the other as it is now: torch pairs parameters by their order."""
    return all(
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.shape == other.shape
        and hasattr(one, "to_local") == hasattr(other, "to_local")
        for one, other in zip_longest(averaged.module.parameters(), model.parameters())
    )
