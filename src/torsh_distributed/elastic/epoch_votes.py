"""Whether all ranks know of the same view to enter, found with the sum that averages their losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.collectives.work import Work
from torsh_distributed.comm.groups import process_group
from torsh_distributed.parallel.strategy import PendingNumber

_QUICK_BACKENDS = ("torsh", "shm")


def is_unanimous(votes: Sequence[float], epoch: int, num_ranks: int) -> bool:
    """Whether every rank has voted for this epoch, from the sums of the votes and of their squares.

    The sum alone does not tell: 0, 1 and 2 add up to three votes for 1. With both, the squared distances from `epoch`
    add up to nothing, so each of them is nothing.
    """
    total, squares = votes
    return total == epoch * num_ranks and squares == epoch**2 * num_ranks


class MeanAndVotes(PendingNumber):
    """The mean loss; with it travel the votes. Our CPU backends send both when they are waited for."""

    def __init__(self, loss: Tensor, epoch: int, on_votes: Callable[[float, Sequence[float]], None]) -> None:
        """`epoch`: what this rank votes for, 0 for nothing. `on_votes` gets the mean and the sums of the votes."""
        # Doubles: the squares of epochs stay exact.
        mean = loss.detach().double() / process_group.world_size()
        self._sent = torch.stack([mean, mean.new_tensor(epoch), mean.new_tensor(epoch**2)])
        self._on_votes = on_votes
        self._work: Work[Tensor] | None = None
        is_late = not self._sent.is_cuda and process_group.backend() in _QUICK_BACKENDS
        if not is_late and process_group.world_size() > 1:
            self._work = all_reduce(self._sent, async_op=True)

    @override
    def wait(self) -> float:
        if self._work is not None:
            total = self._work.wait()
        else:
            total = self._sent if process_group.world_size() == 1 else all_reduce(self._sent)
        loss, *votes = total.tolist()
        self._on_votes(loss, votes)
        return float(loss)
