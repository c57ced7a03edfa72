"""`monitored_barrier` for our groups: a barrier that says which ranks did not come, and leaves the group usable.

torch has it on gloo alone, by messages from and to rank 0. Here the ranks meet in the group's store, so a rank that is
missing leaves no half-done message behind.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from torsh_distributed.comm.meeting.store_meeting import StoreMeeting, wait_for_keys
from torsh_distributed.errors import CommunicationError, OperationTimeout

_PATIENCE_S = 1.0


def missing_ranks(group: dist.ProcessGroup, occasion: str) -> list[int]:
    """The global ranks of `group` that do not answer within a second; the caller has answered.

    Ranks stuck in the same operation have the same deadline and call this at the same time; a rank that is dead,
    stopped, or busy elsewhere does not. `occasion` is the same on all ranks of one operation.
    """
    members = dist.get_process_group_ranks(group)
    meeting = StoreMeeting(
        group.get_group_store(),
        rank=group.rank(),
        num_ranks=len(members),
        timeout_s=_PATIENCE_S,
        operation="roll call",
    )
    name = f"roll-call/{occasion}"
    try:
        meeting.publish(name, group.rank(), None)
        return [members[rank] for rank in meeting.missing(name)]
    except CommunicationError:
        # The host of the store is gone, so nothing is known about the others.
        return []


_PASSED = "passed"
_ANSWER_S = 1.0


def meet_monitored(
    store: dist.Store, number: int, *, rank: int, num_ranks: int, timeout: timedelta, waits_for_all: bool
) -> None:
    """Meet the ranks of a group for the `number`-th time; every rank of the group calls it.

    Rank 0 waits for one rank after the other, so without `waits_for_all` it names the first that is missing, with it
    all of them. The others learn its verdict. Raises OperationTimeout, in the words of gloo's.
    """
    prefix = f"monitored_barrier/{number}"
    if rank == 0:
        _lead(store, prefix, num_ranks, timeout, waits_for_all=waits_for_all)
        if number > 1:
            _forget(store, f"monitored_barrier/{number - 1}", num_ranks)
        return
    store.set(f"{prefix}/{rank}", "1")
    limit_s = timeout.total_seconds() + _ANSWER_S  # rank 0 may have come a moment later than this one
    if not wait_for_keys(store, [f"{prefix}/verdict"], limit_s):
        raise OperationTimeout(
            f"[Rank {rank}]: rank 0 did not come to monitoredBarrier in {_ms(timeout)} ms",
            operation="monitored_barrier",
            missing_ranks=[0],
            rank=rank,
        )
    verdict = store.get(f"{prefix}/verdict").decode()
    if verdict != _PASSED:
        missing = [int(one) for one in verdict.split(",")]
        raise OperationTimeout(
            f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but {_named(missing)} did not",
            operation="monitored_barrier",
            missing_ranks=missing,
            rank=rank,
        )


def _lead(store: dist.Store, prefix: str, num_ranks: int, timeout: timedelta, *, waits_for_all: bool) -> None:
    deadline_s = time.monotonic() + timeout.total_seconds()
    missing = []
    for other in range(1, num_ranks):
        if not wait_for_keys(store, [f"{prefix}/{other}"], deadline_s - time.monotonic()):
            missing.append(other)
            if not waits_for_all:
                break
    store.set(f"{prefix}/verdict", ",".join(map(str, missing)) or _PASSED)
    if missing:
        raise OperationTimeout(
            f"[Rank 0]: {_named(missing)} failed to pass monitoredBarrier in {_ms(timeout)} ms",
            operation="monitored_barrier",
            missing_ranks=missing,
            rank=0,
        )


def _forget(store: dist.Store, prefix: str, num_ranks: int) -> None:
    """Everyone has come to a later barrier, so nobody reads these any more."""
    for name in ("verdict", *map(str, range(1, num_ranks))):
        store.delete_key(f"{prefix}/{name}")


def _named(ranks: list[int]) -> str:
    return f"Rank {ranks[0]}" if len(ranks) == 1 else "Ranks " + ", ".join(map(str, ranks))


def _ms(timeout: timedelta) -> int:
    return round(timeout.total_seconds() * 1000)
