"""Optimizers that synchronize ranks by themselves, for loops without the Engine."""

from torsh_distributed.train.optimizers.async_sgd import AsyncSGD
from torsh_distributed.train.optimizers.distributed import DistributedOptimizer
from torsh_distributed.train.optimizers.elastic_averaging import ElasticAveragingSGD

__all__ = ["AsyncSGD", "DistributedOptimizer", "ElasticAveragingSGD"]
