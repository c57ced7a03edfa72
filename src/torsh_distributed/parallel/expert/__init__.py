"""Mixture of experts: layers whose experts are spread over ranks.

Read `layer` first, then `router` (which experts), `dispatch` (tokens to them), `experts` and `balancing`.
"""

from torsh_distributed.parallel.expert.balancing.balance import LoadBalancer, rebalance
from torsh_distributed.parallel.expert.balancing.lending import Lending, worth_lending
from torsh_distributed.parallel.expert.balancing.placement import Placement
from torsh_distributed.parallel.expert.expert_strategy import ExpertDataParallel
from torsh_distributed.parallel.expert.layer import MoELayer, auxiliary_loss, moe_layers
from torsh_distributed.parallel.expert.router import ExpertRouter, RoutingDecision
from torsh_distributed.parallel.expert.routing_stats import RoutingStats

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
