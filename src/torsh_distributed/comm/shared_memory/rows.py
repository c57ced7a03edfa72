"""Exchange rows between all ranks in any order: gathered by index when sent, or added up by index when received.

One pass over memory; sorting, sending and adding up would be three. For backends that can, see `takes_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.wire import Rows
from torsh_distributed.comm.collectives.call import num_bytes, run
from torsh_distributed.comm.shared_memory.buffers import collective_buffer


def takes_rows(source: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the group's backend exchanges such rows itself; the same on every rank if the rows are alike."""
    return isinstance(group, TorshProcessGroup) and group.takes_rows(source)


def new_rows(num_rows: int, dim: int, like: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Empty rows, in shared memory if there is some: other ranks then write to them or read from them in place.

    For the output of `gather_to_all`, which allocates it itself, and the source of `sum_from_all`. Every rank of the
    group calls this at the same points of its program.
    """
    shared = collective_buffer(num_rows * dim, like.dtype, group, "per_rank")
    return like.new_empty((num_rows, dim)) if shared is None else shared.view(num_rows, dim)


def gather_to_all(
    source: Tensor, sent: Tensor, send: Sequence[int], receive: Sequence[int], *, group: dist.ProcessGroup
) -> Tensor:
    """(sum of receive, dim): `source[sent]` split by `send` and exchanged, without building `source[sent]`."""
    rows = Rows(send=send, receive=receive, row_numel=source.shape[1], sent=sent)
    output = new_rows(sum(receive), source.shape[1], source, group)
    return _exchange(output, source.contiguous(), rows, group)


def sum_from_all(
    source: Tensor,
    received: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    *,
    num_rows: int,
    group: dist.ProcessGroup,
    weights: Tensor | None = None,
) -> Tensor:
    """(num_rows, dim): the rows received, each times its weight, added up at the indices `received`; others are 0."""
    rows = Rows(send=send, receive=receive, row_numel=source.shape[1], received=received, weights=weights)
    output = source.new_empty((num_rows, source.shape[1]))
    return _exchange(output, source.contiguous(), rows, group)


def _exchange(output: Tensor, source: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
    assert isinstance(group, TorshProcessGroup), "the caller has asked takes_rows"

    def start(_: dist.ProcessGroup, is_async: bool) -> None:
        group.exchange_rows(output, source, rows).wait()

    done = run(
        "all_to_all_rows",
        num_bytes(output),
        start,
        lambda: output,
        same=(source.dtype, source.shape[1:]),
        async_op=False,
        group=group,
    )
    assert isinstance(done, Tensor), "it is synchronous"
    return done
