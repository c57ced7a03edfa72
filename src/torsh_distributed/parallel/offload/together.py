"""What fails on one rank fails on all: no rank goes on into a collective that another will never reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.errors import ProcessFailure, TorshError


@contextmanager
def together(operation: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Run the block; afterwards every rank raises its own error, or one that tells of another rank's.

    Every rank of `group` enters. A block may hold collectives only if ranks fail in it alike or after the last one.
    """
    failure: TorshError | None = None
    try:
        yield
    except TorshError as error:
        if group is None or group.size() == 1:
            raise
        failure = error
    if group is None or group.size() == 1:
        return
    said = all_gather_object(None if failure is None else failure.message, group=group)
    if failure is not None:
        raise failure
    for position, message in enumerate(said):
        if message is not None:
            rank = dist.get_global_rank(group, position)
            raise ProcessFailure(
                f"rank {rank} could not {operation}: {message}",
                hint="mend what that rank names; this one was ready",
                operation=operation,
                rank=rank,
            )
