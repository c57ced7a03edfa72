"""With TORSH_DEBUG=1 ranks compare what they are about to do, so a mistake is an error and not a hang.

Every collective is announced in the store, apart from the data plane, and runs only if all announcements are equal.
It costs a few store round trips per collective: use it to find a bug, not for training.
"""

from __future__ import annotations

import json
import time

import torch.distributed as dist

from torsh_distributed.comm.meeting.key_wait import wait_for_keys
from torsh_distributed.comm.recording.flight_recorder import OperationRecord
from torsh_distributed.errors import OperationTimeout, TensorShapeMismatch

_is_enabled = False


def enable_checks(is_enabled: bool) -> None:
    """Turn the comparison on or off in this process; `init()` turns it on if TORSH_DEBUG is set."""
    global _is_enabled
    _is_enabled = is_enabled


def are_checks_enabled() -> bool:
    """Whether every collective is compared across ranks first."""
    return _is_enabled


def require_agreement(group: dist.ProcessGroup, record: OperationRecord, what: str, timeout_s: float) -> None:
    """Raise TensorShapeMismatch on every rank, naming both sides, unless all ranks announce `what`.

    Called by every member before its collective number `record.sequence`.
    """
    store = group.get_group_store()
    members = dist.get_process_group_ranks(group)
    prefix = f"agreement/{record.sequence}"
    me = group.rank()
    store.set(f"{prefix}/{me}", json.dumps({"what": what, "where": record.call_site}))
    deadline = time.monotonic() + timeout_s
    said: list[dict[str, str]] = []
    for position, rank in enumerate(members):
        if not wait_for_keys(store, [f"{prefix}/{position}"], deadline - time.monotonic()):
            raise OperationTimeout(
                f"rank {rank} did not announce operation number {record.sequence} within {timeout_s:g} s",
                hint="it is behind, stuck or gone; this rank is at the call under `got:`",
                operation=what,
                group=record.group,
                missing_ranks=[rank],
                call_site=record.call_site,
            )
        said.append(json.loads(store.get(f"{prefix}/{position}")))
    # All ranks have announced this operation, so all have read the one before: it can go.
    store.delete_key(f"agreement/{record.sequence - 1}/{me}")
    for rank, one in zip(members, said, strict=True):
        if one["what"] != said[0]["what"]:
            raise TensorShapeMismatch(
                f"operation number {record.sequence} differs between ranks: rank {members[0]} calls "
                f"{said[0]['what']} at {said[0]['where']}, rank {rank} calls {one['what']} at {one['where']}",
                hint="all ranks must call the same operations in the same order with the same shapes and dtypes",
                group=record.group,
            )
