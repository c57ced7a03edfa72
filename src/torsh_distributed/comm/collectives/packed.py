"""Several tensors in one all-reduce: fused below a threshold, or packed into buckets.

Why: a small tensor costs as much latency as a large one. Tensors that travel together pay it once, plus a copy in and
a copy out, and memory is far faster than the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from torsh_distributed.comm.algorithms.base import Algorithm
from torsh_distributed.comm.algorithms.execution import check_on_cpu, new_channel, start, with_flat
from torsh_distributed.comm.algorithms.reduce_scatter_all_gather import fold_own_shard
from torsh_distributed.comm.algorithms.tree import binomial_branch, broadcast_down
from torsh_distributed.comm.collectives.call import CallOptions, check_member, num_bytes, resolve_group, run
from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.comm.collectives.reductions import all_reduce
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


def fused_all_reduce(
    tensors: Sequence[Tensor],
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    threshold_bytes: int = 64 * 1024,
    algorithm: str | Algorithm | None = None,
    deterministic: bool = False,
    **options: Unpack[CallOptions],
) -> list[Tensor]:
    """Fold each of `tensors` over all ranks, in place; those below the threshold travel together, larger ones alone.

    Every rank passes tensors of the same shapes and dtypes in the same order. Tensors of one dtype and device fuse.
    """
    packs = plan_fused([num_bytes(tensor) for tensor in tensors], _kinds(tensors), threshold_bytes=threshold_bytes)
    return _reduce_packs(
        tensors,
        packs,
        lambda buffer: all_reduce(buffer, op, algorithm=algorithm, deterministic=deterministic, **options),
    )


def bucketed_all_reduce(
    tensors: Sequence[Tensor],
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    bucket_bytes: int = 25 * 2**20,
    algorithm: str | Algorithm | None = None,
    deterministic: bool = False,
    **options: Unpack[CallOptions],
) -> list[Tensor]:
    """Fold each of `tensors` over all ranks, in place, in buckets filled in order up to `bucket_bytes`.

    One bucket is copied at a time. A larger tensor travels alone. Every rank passes tensors of the same shapes and
    dtypes in the same order.
    """
    packs = plan_buckets([num_bytes(tensor) for tensor in tensors], _kinds(tensors), bucket_bytes=bucket_bytes)
    return _reduce_packs(
        tensors,
        packs,
        lambda buffer: all_reduce(buffer, op, algorithm=algorithm, deterministic=deterministic, **options),
    )


Pack = tuple[int, ...]
"""The indices of tensors that travel together."""


def plan_fused(sizes_bytes: Sequence[int], kinds: Sequence[object], *, threshold_bytes: int) -> list[Pack]:
    """One pack for each kind of tensor below the threshold; a pack of one for every larger tensor."""
    if threshold_bytes < 0:
        raise InvalidArgument("threshold_bytes must not be negative", got=threshold_bytes)
    small: dict[object, list[int]] = {}
    large: list[Pack] = []
    for index, (size_bytes, kind) in enumerate(zip(sizes_bytes, kinds, strict=True)):
        if size_bytes < threshold_bytes:
            small.setdefault(kind, []).append(index)
        else:
            large.append((index,))
    return [*map(tuple, small.values()), *large]


def plan_buckets(sizes_bytes: Sequence[int], kinds: Sequence[object], *, bucket_bytes: int) -> list[Pack]:
    """Packs of one kind each, filled in order, none above `bucket_bytes` unless it holds a single tensor."""
    if bucket_bytes <= 0:
        raise InvalidArgument("bucket_bytes must be above zero", got=bucket_bytes)
    return list(_fill(sizes_bytes, kinds, bucket_bytes))


def _fill(sizes_bytes: Sequence[int], kinds: Sequence[object], bucket_bytes: int) -> Iterator[Pack]:
    open_packs: dict[object, tuple[list[int], int]] = {}
    for index, (size_bytes, kind) in enumerate(zip(sizes_bytes, kinds, strict=True)):
        members, filled_bytes = open_packs.get(kind, ([], 0))
        if members and filled_bytes + size_bytes > bucket_bytes:
            yield tuple(members)
            members, filled_bytes = [], 0
        members.append(index)
        open_packs[kind] = (members, filled_bytes + size_bytes)
    for members, _ in open_packs.values():
        yield tuple(members)


def _kinds(tensors: Sequence[Tensor]) -> list[object]:
    return [(tensor.dtype, tensor.device) for tensor in tensors]


def _reduce_packs(tensors: Sequence[Tensor], packs: Sequence[Pack], reduce: Callable[[Tensor], object]) -> list[Tensor]:
    for pack in packs:
        if len(pack) == 1:
            reduce(tensors[pack[0]])
            continue
        members = [tensors[index].detach() for index in pack]
        buffer = torch.cat([member.reshape(-1) for member in members])
        reduce(buffer)
        parts = torch.split(buffer, [member.numel() for member in members])
        for member, part in zip(members, parts, strict=True):
            member.copy_(part.view(member.shape))
    return list(tensors)
