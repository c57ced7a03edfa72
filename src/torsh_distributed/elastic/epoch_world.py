"""Bring up the world of a view: a connection to the job's store of its own, under the epoch's own prefix.

Keys of one epoch are never read by another, so a worker that was given up and comes back finds nobody. The connection
can be cut by the line's thread: a worker that is lost while the others regroup does not hold them up.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist

from torsh_distributed import known_variables
from torsh_distributed.comm.groups.abort import abort_all
from torsh_distributed.comm.groups.process_group import enter_world
from torsh_distributed.comm.meeting.rendezvous import open_store
from torsh_distributed.comm.store.store import Store
from torsh_distributed.elastic.entering import WorldChanged
from torsh_distributed.elastic.membership_client import WorldView


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
