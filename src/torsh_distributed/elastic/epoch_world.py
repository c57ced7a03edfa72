"""Bring up the world of a view: a connection to the job's store of its own, under the epoch's own prefix.

Keys of one epoch are never read by another, so a worker that was given up and comes back finds nobody. The connection
can be cut by the line's thread: a worker that is lost while the others regroup does not hold them up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed import known_variables
from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.comm.collectives.work import Work
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.groups.abort import abort_all
from torsh_distributed.comm.groups.process_group import enter_world
from torsh_distributed.comm.meeting.rendezvous import open_store
from torsh_distributed.comm.store.store import Store
from torsh_distributed.elastic.entering import WorldChanged
from torsh_distributed.elastic.membership_client import WorldView
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


class EpochWorld:
    """The present world of a worker; in the first epoch it is the one that `init` brought up."""

    def __init__(self, member: int) -> None:
        self._member = member
        self._store: dist.Store | None = None
        self._next_store: dist.Store | None = None

    def enter(self, view: WorldView, *, is_newest: Callable[[], bool], timeout_s: float) -> None:
        """Leave the present world for that of `view`; every member calls this. Raises if it is cancelled.

        `is_newest` is asked once `cancel` can reach the wait: news that came before found nothing to cut.
        """
        store = self._next_store = open_jobs_store(timeout_s)
        attempt = known_variables.text("TORCHELASTIC_RESTART_COUNT")
        try:
            if not is_newest():
                raise WorldChanged
            enter_world(
                dist.PrefixStore(f"torsh/{attempt}/epoch/{view.epoch}", store),
                rank=view.members.index(self._member),
                world_size=len(view.members),
                epoch=view.epoch,
                timeout_s=timeout_s,
            )
        except BaseException:
            _close(store)
            raise
        finally:
            self._next_store = None
        before, self._store = self._store, store
        if before is not None:
            _close(before)

    def cancel(self) -> None:
        """From the line's thread: release whatever waits, in the present world or on the way to the next."""
        store = self._next_store
        if isinstance(store, Store):
            store.cut()
        abort_all("the world changes again")


def open_jobs_store(timeout_s: float) -> dist.Store:
    """A connection of its own to the store of the job, which outlives every world."""
    return open_store(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_host=False,
        timeout_s=timeout_s,
        has_torch_agent=True,
    )


def _close(store: dist.Store) -> None:
    if isinstance(store, Store):
        store.close()
