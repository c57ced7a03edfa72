"""Offload that keeps a budget: state in host memory and on disk, parameters on the device while they work."""

from torsh_distributed.parallel.offload.optimizer import OffloadedOptimizer
from torsh_distributed.parallel.offload.paged import PagedDataParallel
from torsh_distributed.parallel.offload.state_offload import StateOffload
from torsh_distributed.parallel.offload.stats import OffloadStats, TierUse

__all__ = ["OffloadStats", "OffloadedOptimizer", "PagedDataParallel", "StateOffload", "TierUse"]
