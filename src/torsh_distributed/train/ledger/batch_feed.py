"""What an Engine hands out of each global batch: this rank's share, weighed against those of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.train.batches import Batch, RankBatch, count_pieces, to_device
from torsh_distributed.train.job_changes.divided_batches import DividedBatches
from torsh_distributed.train.ledger.sample_ledger import SampleLedger


class BatchFeed:
    """The share in progress: `take` one of what `use` was given, and `leave` it when the next is asked for.

    Averaging weighs ranks equally, but samples must weigh equally: so a loss is weighed by `evenness`.
    """

    def __init__(self, ledger: SampleLedger, device: torch.device, strategy: Callable[[], Strategy]) -> None:
        """`strategy` gives that of the present world."""
        self._ledger = ledger
        self._device = device
        self._strategy = strategy
        self.evenness: float | None = None
        """This rank's samples over an equal share; None for a batch of the user's own: others may have more of it."""
        self._total: int | None = None
        self.divided: DividedBatches | None = None
        """In an elastic job: the batches of the epoch, which can be divided again."""

    @property
    def place(self) -> tuple[int, int]:
        """Which part of each global batch is this rank's, of how many."""
        strategy = self._strategy()
        return strategy.data_rank, strategy.data_degree

    def use(self, pieces: Iterator[RankBatch]) -> Iterator[RankBatch]:
        """The shares of an epoch, from where the ledger stands."""
        self.divided = pieces if isinstance(pieces, DividedBatches) else None
        return pieces

    def take(self, piece: RankBatch, step: int) -> Batch:
        """This rank's share of a global batch; the ledger knows whose the rest is."""
        rank, degree = self.place
        self._ledger.open(piece.total, ids=piece.ids, position=piece.position)
        self._ledger.assign(step, range(degree), me=rank)
        if piece.total == 0:
            raise InvalidArgument("the batch is empty", hint="the loader gave a batch without samples")
        self.evenness, self._total = piece.num_samples * degree / piece.total, piece.total
        return to_device(piece.batch, self._device)

    def leave(self) -> None:
        """What comes next is not from the share that was taken last."""
        self.evenness = self._total = None

    def least_passes(self, count: int) -> int:
        """Passes that every rank makes where ranks communicate in forward: those of the rank that needs the most."""
        strategy, total = self._strategy(), self._total
        if total is None or not strategy.forward_is_collective:
            return 1
        degree = strategy.data_degree
        shares = (max(1, total // degree), -(-total // degree))
        return max(count_pieces(share, count, multiple=strategy.rows_multiple) for share in shares)

    def num_global(self, num_samples: int | None) -> int | None:
        """Samples of the whole batch; where it was not taken here, all ranks are taken to have as many."""
        if num_samples is None:
            return None
        return self._total if self._total is not None else num_samples * self._strategy().data_degree
