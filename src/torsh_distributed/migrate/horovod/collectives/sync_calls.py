"""The operations that wait for their result. Those that return new tensors are differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.migrate.horovod.collectives.async_calls import (
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    reducescatter_async,
)
from torsh_distributed.migrate.horovod.collectives.horovod_compression import (
    CodecCompressor,
    Compression,
    Compressor,
    submit_codec_mean,
)
from torsh_distributed.migrate.horovod.collectives.operation_submission import synchronize
from torsh_distributed.migrate.horovod.collectives.reduction_names import Average, ReductionName, Sum, chosen_reduction
from torsh_distributed.migrate.horovod.process_sets import ProcessSet, global_process_set, set_ranks, set_size
from torsh_distributed.migrate.horovod.world_state import world

AnyCompression = type[Compressor] | Compressor
"""A class or an object with `compress` and `decompress`."""


class _AllReduce(torch.autograd.Function):
    """The gradient of a reduction is reduced in the same way."""

    @staticmethod
    @override
    def forward(ctx: Any, name: str | None, options: dict[str, Any], *tensors: Tensor) -> Any:
        ctx.options = options
        ctx.is_group = len(tensors) > 1 or options.get("is_group", False)
        given = {key: value for key, value in options.items() if key != "is_group"}
        if ctx.is_group:
            return synchronize(grouped_allreduce_async(tensors, name=name, **given))
        return synchronize(allreduce_async(tensors[0], name=name, **given))

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        given = {key: value for key, value in ctx.options.items() if key != "is_group"}
        dense = [grad.contiguous() for grad in grads]
        if ctx.is_group:
            return None, None, *synchronize(grouped_allreduce_async(dense, **given))
        return None, None, synchronize(allreduce_async(dense[0], **given))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompression = Compression.none,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over the ranks; the argument is not changed."""
    chosen = chosen_reduction(op, average)
    if isinstance(compression, CodecCompressor):
        label = name or f"{tuple(tensor.shape)}"
        factor = prescale_factor * postscale_factor
        result: Tensor = synchronize(
            submit_codec_mean([tensor], [label], name, compression, chosen, factor, process_set)
        )[0]
        return result
    small, context = compression.compress(tensor)
    options = _options(chosen, prescale_factor, postscale_factor, process_set)
    reduced: Tensor = _AllReduce.apply(name, options, small)  # type: ignore[no-untyped-call]  # untyped in torch
    return compression.decompress(reduced, context)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over the ranks, in place."""
    reduced: Tensor = synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return reduced


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompression = Compression.none,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors as one operation; the arguments are not changed."""
    chosen = chosen_reduction(op, average)
    if isinstance(compression, CodecCompressor):
        labels = [f"{name or 'group'}.{index}" for index in range(len(tensors))]
        factor = prescale_factor * postscale_factor
        return list(
            synchronize(submit_codec_mean(list(tensors), labels, name, compression, chosen, factor, process_set))
        )
    pairs = [compression.compress(tensor) for tensor in tensors]
    options = {**_options(chosen, prescale_factor, postscale_factor, process_set), "is_group": True}
    reduced = _AllReduce.apply(name, options, *(small for small, _ in pairs))  # type: ignore[no-untyped-call]  # untyped in torch
    return [compression.decompress(one, context) for one, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionName | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors as one operation, in place."""
    return list(
        synchronize(
            grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
        )
    )


def _options(op: ReductionName, prescale: float, postscale: float, process_set: ProcessSet) -> dict[str, Any]:
    return {
        "op": op,
        "prescale_factor": prescale,
        "postscale_factor": postscale,
        "process_set": process_set,
    }


class _AllGather(torch.autograd.Function):
    """The gradient of a rank's rows is the mean of what all ranks found for them."""

    @staticmethod
    @override
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, is_group: bool, *tensors: Tensor) -> Any:
        ctx.process_set = process_set
        ctx.num_rows = [tensor.shape[0] if tensor.dim() else 1 for tensor in tensors]
        ctx.shapes = [tensor.shape for tensor in tensors]
        if is_group:
            return synchronize(grouped_allgather_async(tensors, name, process_set))
        return synchronize(allgather_async(tensors[0], name, process_set))

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        own = []
        position = set_ranks(ctx.process_set).index(world().rank)
        for grad, num_rows, shape in zip(grads, ctx.num_rows, ctx.shapes, strict=True):
            mean = synchronize(allreduce_async(grad.contiguous(), op=Average, process_set=ctx.process_set))
            counts = synchronize(
                allgather_async(torch.tensor([num_rows], dtype=torch.int32), process_set=ctx.process_set)
            ).tolist()
            own.append(mean.split(counts)[position].reshape(shape))
        return None, None, None, *own


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the tensors of all ranks along dim 0, whose size may differ from rank to rank."""
    gathered: Tensor = _AllGather.apply(name, process_set, False, tensor)  # type: ignore[no-untyped-call]  # untyped in torch
    return gathered


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors as one operation."""
    return list(_AllGather.apply(name, process_set, True, *tensors))  # type: ignore[no-untyped-call]  # untyped in torch


class _Broadcast(torch.autograd.Function):
    """The root's gradient is the mean of all ranks' gradients; the others' tensors had no effect."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        result: Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mean = synchronize(allreduce_async(grads[0].contiguous(), op=Average, process_set=ctx.process_set))
        return mean if world().rank == ctx.root_rank else torch.zeros_like(mean), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of `root_rank`, a rank of the world, as a new tensor on every rank."""
    result: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Make a tensor equal to that of `root_rank`, in place."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


class _AllToAll(torch.autograd.Function):
    """The gradient goes back the way the rows came."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        rows, counts = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set = process_set
        ctx.received = counts.to("cpu")
        ctx.shape = tensor.shape
        ctx.mark_non_differentiable(counts)
        return rows, counts

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        returned, _ = synchronize(alltoall_async(grads[0].contiguous(), ctx.received, None, ctx.process_set))
        if returned.shape[0] < ctx.shape[0]:  # rows beyond the splits were not sent
            whole = returned.new_zeros(ctx.shape)
            whole[: returned.shape[0]] = returned
            returned = whole
        return returned, None, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows to every rank and return those received; with `splits` also how many came from each rank (int32)."""
    rows, counts = _AllToAll.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]  # untyped in torch
    return rows if splits is None else (rows, counts)


class _ReduceScatter(torch.autograd.Function):
    """The gradient of all rows is gathered from the ranks that hold them."""

    @staticmethod
    @override
    def forward(ctx: Any, name: str | None, options: dict[str, Any], is_group: bool, *tensors: Tensor) -> Any:
        ctx.options = options
        if is_group:
            return synchronize(grouped_reducescatter_async(tensors, name, **options))
        return synchronize(reducescatter_async(tensors[0], name, **options))

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        options = ctx.options
        num_ranks = set_size(options["process_set"])
        factor = options["prescale_factor"] * options["postscale_factor"]
        # Horovod's rule: the gradient of a mean is gathered as it is, that of a sum counts once for every rank.
        factor *= num_ranks if options["op"] == Sum else 1
        gathered = [
            synchronize(allgather_async((grad * factor).contiguous(), None, options["process_set"])) for grad in grads
        ]
        return None, None, None, *gathered


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: AnyCompression = Compression.none,
    op: ReductionName = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce over the ranks and return this rank's rows; if they do not divide, the first ranks get one more."""
    small, context = compression.compress(tensor)
    options = _options(op, prescale_factor, postscale_factor, process_set)
    part: Tensor = _ReduceScatter.apply(name, options, False, small)  # type: ignore[no-untyped-call]  # untyped in torch
    return compression.decompress(part, context)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: AnyCompression = Compression.none,
    op: ReductionName = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors as one operation."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    options = _options(op, prescale_factor, postscale_factor, process_set)
    parts = _ReduceScatter.apply(name, options, True, *(small for small, _ in pairs))  # type: ignore[no-untyped-call]  # untyped in torch
    return [compression.decompress(one, context) for one, (_, context) in zip(parts, pairs, strict=True)]
