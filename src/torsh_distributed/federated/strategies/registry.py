"""Strategies by their names, for the command line."""

from __future__ import annotations

import difflib

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.federated.strategies.adaptive_server import FedAdagrad, FedAdam, FedYogi
from torsh_distributed.federated.strategies.averaging import FedAvg, FedAvgM, FedMom, FedProx
from torsh_distributed.federated.strategies.base import FederatedStrategy
from torsh_distributed.federated.strategies.uneven_work import FedNova, Scaffold

_KINDS: tuple[type[FederatedStrategy], ...] = (
    *(FedAvg, FedProx, FedNova, FedAvgM, FedMom, FedAdam, FedYogi, FedAdagrad, Scaffold),
)
STRATEGIES: dict[str, type[FederatedStrategy]] = {kind.name: kind for kind in _KINDS}


def strategy_named(name: str) -> FederatedStrategy:
    """The strategy with its defaults."""
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, 1)
        raise InvalidArgument(
            "there is no strategy of this name",
            hint=f"did you mean {near[0]}?" if near else f"one of {', '.join(STRATEGIES)}",
            strategy=name,
        )
    return STRATEGIES[name]()
