"""Rows from each rank to each in an order of one's own: gathered as they leave, added up as they arrive.

One pass over memory where sorting, sending and adding up would be three. For backends that can, see `takes_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.wire import Rows
from torsh_distributed.comm.collectives.tensors import num_bytes, run
from torsh_distributed.comm.shared_memory import collective_buffer


def takes_rows(source: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the group's backend exchanges such rows itself; the same on every rank, if rows are alike there."""
    return isinstance(group, TorshProcessGroup) and group.takes_rows(source)


def new_rows(num_rows: int, dim: int, like: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Empty rows, in common memory where there is some: the others write into them or read from them as they lie.

    For the output of `gather_to_all`, which asks for it itself, and the source of `sum_from_all`. Every rank of the
    group asks at the same points of its program.
    """
    shared = collective_buffer(num_rows * dim, like.dtype, group, "per_rank")
    return like.new_empty((num_rows, dim)) if shared is None else shared.view(num_rows, dim)


def gather_to_all(
    source: Tensor, sent: Tensor, send: Sequence[int], receive: Sequence[int], *, group: dist.ProcessGroup
) -> Tensor:
    """(sum of receive, dim): `source[sent]` cut by `send` and exchanged, without making `source[sent]`."""
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
    """(num_rows, dim): the rows that come, each times its weight, added up where `received` says; others are 0."""
    rows = Rows(send=send, receive=receive, row_numel=source.shape[1], received=received, weights=weights)
    output = source.new_empty((num_rows, source.shape[1]))
    return _exchange(output, source.contiguous(), rows, group)


def _exchange(output: Tensor, source: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
    assert isinstance(group, TorshProcessGroup), "asked for by takes_rows"

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
    assert isinstance(done, Tensor), "it was not asked for asynchronously"
    return done
