"""Operations without tensors: `barrier` and `join`."""

from __future__ import annotations

import itertools
from typing import Any

from torsh_distributed.migrate.horovod.collectives.operation_submission import submit, synchronize
from torsh_distributed.migrate.horovod.negotiation.pending_op import PendingOp
from torsh_distributed.migrate.horovod.negotiation.request import OpKind, Request
from torsh_distributed.migrate.horovod.process_sets import ProcessSet, global_process_set, registered_set
from torsh_distributed.migrate.horovod.world_state import world

_CALLS_BETWEEN_JOINS = 10**12
"""More than there are: unnamed operations before and after a join never have the same number."""


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called this. Operations in flight do not hold it up."""
    synchronize(submit(OpKind.BARRIER, [], "all", process_set, finish=_nothing))


def _nothing(_: list[Any]) -> None:
    return None


def join(device: int = -1) -> int:
    """Take part in the all-reduces of the other ranks, with zeros, until every rank has called this.

    For ranks that run out of data first. Means are still over all ranks. Returns the rank that came last. `device` is
    Horovod's: zeros are made on the device of the operation.
    """
    joined = registered_set(global_process_set)
    op = PendingOp(Request("join", OpKind.JOIN), [])
    joined.engine.submit(op)
    last = joined.engine.wait(op)
    # Ranks have made different numbers of calls; from here on they make the same again.
    joined.num_joins += 1
    joined.unnamed = itertools.count(joined.num_joins * _CALLS_BETWEEN_JOINS)
    return world().members.index(last)
