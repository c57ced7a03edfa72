"""Operations without tensors: `barrier` and `join`."""

from __future__ import annotations

from torsh_distributed.migrate.horovod.collectives.submission import submit, synchronize
from torsh_distributed.migrate.horovod.negotiation.pending_op import PendingOp
from torsh_distributed.migrate.horovod.negotiation.request import OpKind, Request
from torsh_distributed.migrate.horovod.process_sets import ProcessSet, engine_of, global_process_set
from torsh_distributed.migrate.horovod.world_state import world


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called this. Operations in flight do not hold it up."""
    synchronize(submit(OpKind.BARRIER, [], "all", process_set, finish=_nothing))


def _nothing(_: PendingOp) -> None:
    return None


def join(device: int = -1) -> int:
    """Take part in the all-reduces of the other ranks, with zeros, until every rank has called this.

    For ranks that run out of data first. Means are still over all ranks. Returns the rank that came last. `device` is
    Horovod's: zeros are made on the device of the operation.
    """
    engine = engine_of(global_process_set)
    op = PendingOp(Request("join", OpKind.JOIN), [])
    engine.submit(op)
    last = engine.wait(op)
    return world().members.index(last)
