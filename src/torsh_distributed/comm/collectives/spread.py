"""Broadcasts along a tree and from several roots, and a reduce-scatter for tensors of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from torsh_distributed.comm.algorithms.execution import check_on_cpu, new_channel, start, with_flat
from torsh_distributed.comm.algorithms.reduce_scatter_all_gather import fold_own_shard
from torsh_distributed.comm.algorithms.tree import binomial_branch, broadcast_down
from torsh_distributed.comm.collectives.call import CallOptions, check_member, num_bytes, resolve_group, run
from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.comm.collectives.work import Work
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.errors import InvalidArgument


@overload
def tree_broadcast(
    tensor: Tensor, src: int, *, async_op: Literal[False] = ..., **options: Unpack[CallOptions]
) -> Tensor: ...
@overload
def tree_broadcast(
    tensor: Tensor, src: int, *, async_op: Literal[True], **options: Unpack[CallOptions]
) -> Work[Tensor]: ...
def tree_broadcast(
    tensor: Tensor, src: int, *, async_op: bool = False, **options: Unpack[CallOptions]
) -> Tensor | Work[Tensor]:
    """Make every rank's `tensor` equal to that of rank `src`, in place, along a binomial tree.

    Why: log2(p)·(α + nβ); the source sends log2(p) messages, not p-1.
    """
    group = resolve_group(options.get("group"))
    check_member(src, "src", group)
    check_on_cpu(tensor)
    root = dist.get_group_rank(group, src)

    def begin(group: dist.ProcessGroup, _: bool) -> dist.Work | None:
        channel = new_channel(group, options.get("timeout_s"))
        branch = binomial_branch(channel.position, channel.size, root=root)

        def body() -> None:
            with_flat(tensor, lambda flat: broadcast_down(flat, channel, branch))

        return start("broadcast:tree", body, tensor, group, is_async=async_op)

    return run("broadcast:tree", num_bytes(tensor), begin, lambda: tensor, async_op=async_op, **options)


def multi_root_broadcast(
    tensors: Sequence[Tensor], sources: Sequence[int], **options: Unpack[CallOptions]
) -> list[Tensor]:
    """Make every rank's tensors[i] equal to that of rank sources[i], in place.

    Why: all start at once, so roots send at the same time. It takes as long as the busiest root, not as long as all
    roots one after the other. Every rank passes all tensors, in the same order.
    """
    if len(tensors) != len(sources):
        raise InvalidArgument(
            "each tensor needs a source",
            hint="give as many sources as tensors; a source may appear more than once",
            num_tensors=len(tensors),
            num_sources=len(sources),
        )
    for source in sources:  # all before the first is started: a refusal halfway would hang the others
        check_member(source, "source", options.get("group"))
    works = [
        broadcast(tensor, source, async_op=True, **options) for tensor, source in zip(tensors, sources, strict=True)
    ]
    return [work.wait() for work in works]


def scatter_reduce(tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, **options: Unpack[CallOptions]) -> Tensor:
    """This rank's shard of the fold of `tensor` over all ranks, for tensors of any size.

    The values are taken as one run of numbers and cut into shards whose sizes differ by at most one (as
    `torch.tensor_split` does); `reduce_scatter_single` needs rows that divide. Added in the order of ranks: the bits
    do not depend on the backend. Costs α + (p-2)μ + (p-1)/p·nβ. `tensor` is left as it was.
    """
    chosen = ReduceOp.parse(op)
    chosen.check(tensor.dtype)
    check_on_cpu(tensor)
    shard: list[Tensor] = []

    def begin(group: dist.ProcessGroup, _: bool) -> None:
        channel = new_channel(group, options.get("timeout_s"))
        shards = tensor.detach().clone().contiguous().view(-1).tensor_split(channel.size)
        fold_own_shard(shards, chosen, channel)
        shard.append(shards[channel.position].clone())

    run("scatter_reduce", num_bytes(tensor), begin, lambda: None, async_op=False, **options)
    return shard[0]
