"""Offload within memory budgets: state in host memory and on disk, parameters on the device only while in use.

Read `paged` and `state_offload` first, then `storage`, `paging`, `update` and `budget`.
"""

from torsh_distributed.parallel.offload.offload_stats import OffloadStats, TierUse
from torsh_distributed.parallel.offload.paged import PagedDataParallel
from torsh_distributed.parallel.offload.state_offload import StateOffload
from torsh_distributed.parallel.offload.update.optimizer import OffloadedOptimizer

__all__ = ["OffloadStats", "OffloadedOptimizer", "PagedDataParallel", "StateOffload", "TierUse"]
