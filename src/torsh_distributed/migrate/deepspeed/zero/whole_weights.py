"""The weights of a model that is spread over ranks, as whole tensors."""

from __future__ import annotations

from torch import Tensor, nn

from torsh_distributed.parallel.state.whole_state import plain_name
from torsh_distributed.parallel.strategy import Strategy


def whole_weights(strategy: Strategy, *, keeps: bool, exclude: set[str] = frozenset()) -> dict[str, Tensor]:  # type: ignore[assignment]  # an empty set
    """The model's state with whole tensors in host memory, where `keeps`; every rank calls this.

    One tensor at a time is whole on the other ranks.
    """
    found: dict[str, Tensor] = {}
    for name, value in strategy.whole_tensors():
        if keeps and name not in exclude and isinstance(value, Tensor):
            found[name] = value.detach().to("cpu", copy=True)
    return found


def frozen_names(module: nn.Module) -> set[str]:
    """The parameters that are not trained."""
    return {plain_name(name) for name, param in module.named_parameters() if not param.requires_grad}
