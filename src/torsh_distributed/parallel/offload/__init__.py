"""Offload that keeps a budget: state in host memory and on disk, parameters on the device while they work."""

from torsh_distributed.parallel.offload.offload_stats import OffloadStats, TierUse
from torsh_distributed.parallel.offload.paged import PagedDataParallel
from torsh_distributed.parallel.offload.state_offload import StateOffload
from torsh_distributed.parallel.offload.update.optimizer import OffloadedOptimizer

__all__ = ["OffloadStats", "OffloadedOptimizer", "PagedDataParallel", "StateOffload", "TierUse"]
