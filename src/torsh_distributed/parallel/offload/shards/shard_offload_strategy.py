"""The strategy for `mesh.shard` with `offload.params`: shards, gradients and optimizer state within budgets."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.parallel.offload.offload_stats import OffloadStats
from torsh_distributed.parallel.offload.shards.offloaded_shards import OffloadedShards
from torsh_distributed.parallel.offload.update.optimizer import OffloadedOptimizer
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
from torsh_distributed.parallel.sharded.sharded_strategy import Sharded


class ShardedOffload(Sharded):
    """Shards that are gathered from host memory or disk; gradients are reduced to shards in every pass."""

    def __init__(self, wrapped: FullyShardedDataParallel, keeper: OffloadedShards) -> None:
        super().__init__(wrapped)
        self._keeper = keeper

    def offload_optimizer(self, optimizer: Optimizer) -> OffloadedOptimizer:
        """The optimizer to train with; every rank calls this, before the first step."""
        return self._keeper.offload_optimizer(optimizer)

    @override
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Passes before the last reduce too: whole gradients of the model would not fit anywhere."""
        return nullcontext()

    def stats(self) -> OffloadStats:
        """Measured statistics of this rank so far; `over_ranks()` of them is the totals."""
        return self._keeper.stats()

    def close(self) -> None:
        """Give the parameters ordinary host memory, and free storage; the optimizer is unusable then."""
        self.reshard()
        self._keeper.close()
