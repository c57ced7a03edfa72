"""Mixture of experts: layers whose experts are spread over ranks."""

from torsh_distributed.parallel.expert.balance import LoadBalancer, rebalance
from torsh_distributed.parallel.expert.layer import MoELayer, auxiliary_loss, moe_layers
from torsh_distributed.parallel.expert.lending import Lending, worth_lending
from torsh_distributed.parallel.expert.placement import Placement
from torsh_distributed.parallel.expert.router import ExpertRouter, RoutingDecision
from torsh_distributed.parallel.expert.stats import RoutingStats
from torsh_distributed.parallel.expert.strategy import ExpertDataParallel

__all__ = [
    "ExpertDataParallel",
    "ExpertRouter",
    "Lending",
    "LoadBalancer",
    "MoELayer",
    "Placement",
    "RoutingDecision",
    "RoutingStats",
    "auxiliary_loss",
    "moe_layers",
    "rebalance",
    "worth_lending",
]
