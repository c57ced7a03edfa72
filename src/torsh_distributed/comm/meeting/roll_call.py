"""Who is not there? Asked when a wait has failed, through the store, which is not the data plane."""

from __future__ import annotations

import time

import torch.distributed as dist

from torsh_distributed.comm.meeting.key_wait import wait_for_keys

_PATIENCE_S = 1.0


def missing_ranks(group: dist.ProcessGroup, occasion: str) -> list[int]:
    """The global ranks of `group` that do not answer within a second; the caller has answered.

    Ranks stuck in the same operation have the same deadline and come here at the same time; a rank that is dead,
    stopped, or busy elsewhere does not. `occasion` is the same on all ranks of one operation.
    """
    store = group.get_group_store()
    members = dist.get_process_group_ranks(group)
    me = members[group.rank()]
    prefix = f"roll-call/{occasion}"
    try:
        store.set(f"{prefix}/{me}", "here")
        deadline = time.monotonic() + _PATIENCE_S
        return [rank for rank in members if not wait_for_keys(store, [f"{prefix}/{rank}"], deadline - time.monotonic())]
    except dist.DistNetworkError:
        # The store's host is gone with its rank: nothing can be said of the others.
        return []
