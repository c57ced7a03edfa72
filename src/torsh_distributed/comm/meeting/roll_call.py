"""Who is missing? Asked through the store after a wait has failed, because the store is not the data plane."""

from __future__ import annotations

import torch.distributed as dist

from torsh_distributed.comm.meeting.store_meeting import StoreMeeting
from torsh_distributed.errors import CommunicationError

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
