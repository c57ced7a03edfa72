"""Moves: values travel between ranks unchanged; `barrier` moves none. `call` says what holds for all operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from torsh_distributed.comm.collectives.call import (
    CallOptions,
    check_even_rows,
    check_member,
    check_one_per_rank,
    num_bytes,
    resolve_group,
    run,
)
from torsh_distributed.comm.collectives.work import Work
from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch


@overload
def broadcast(
    tensor: Tensor, src: int, *, async_op: Literal[False] = ..., **options: Unpack[CallOptions]
) -> Tensor: ...
@overload
def broadcast(tensor: Tensor, src: int, *, async_op: Literal[True], **options: Unpack[CallOptions]) -> Work[Tensor]: ...
def broadcast(
    tensor: Tensor, src: int, *, async_op: bool = False, **options: Unpack[CallOptions]
) -> Tensor | Work[Tensor]:
    """Make every rank's `tensor` equal to that of rank `src`, in place."""
    check_member(src, "src", options.get("group"))
    return run(
        "broadcast",
        num_bytes(tensor),
        lambda group, is_async: dist.broadcast(tensor, src, group=group, async_op=is_async),
        lambda: tensor,
        same=(tensor.dtype, tensor.shape, src),
        async_op=async_op,
        **options,
    )


@overload
def all_gather(tensor: Tensor, *, async_op: Literal[False] = ..., **options: Unpack[CallOptions]) -> list[Tensor]: ...
@overload
def all_gather(tensor: Tensor, *, async_op: Literal[True], **options: Unpack[CallOptions]) -> Work[list[Tensor]]: ...
def all_gather(
    tensor: Tensor, *, async_op: bool = False, **options: Unpack[CallOptions]
) -> list[Tensor] | Work[list[Tensor]]:
    """The tensors of all ranks, by rank, all of one shape. If shapes differ use `all_gather_varsize`."""
    source = tensor.contiguous()
    gathered = [torch.empty_like(source) for _ in range(resolve_group(options.get("group")).size())]
    return run(
        "all_gather",
        num_bytes(tensor) * len(gathered),
        lambda group, is_async: dist.all_gather(gathered, source, group=group, async_op=is_async),
        lambda: gathered,
        same=(tensor.dtype, tensor.shape),
        async_op=async_op,
        **options,
    )


@overload
def all_gather_single(tensor: Tensor, *, async_op: Literal[False] = ..., **options: Unpack[CallOptions]) -> Tensor: ...
@overload
def all_gather_single(tensor: Tensor, *, async_op: Literal[True], **options: Unpack[CallOptions]) -> Work[Tensor]: ...
def all_gather_single(
    tensor: Tensor, *, async_op: bool = False, **options: Unpack[CallOptions]
) -> Tensor | Work[Tensor]:
    """The tensors of all ranks, which have one shape, concatenated along dim 0 in order of rank."""
    if tensor.dim() == 0:
        raise InvalidArgument(
            "all_gather_single needs a tensor of one dim or more", hint="use all_gather for single values"
        )
    source = tensor.contiguous()
    num_rows = source.shape[0] * resolve_group(options.get("group")).size()
    gathered = source.new_empty((num_rows, *source.shape[1:]))
    return run(
        "all_gather_single",
        num_bytes(gathered),
        lambda group, is_async: c10d_all_gather_single(gathered, source, group=group, async_op=is_async),
        lambda: gathered,
        same=(tensor.dtype, tensor.shape),
        async_op=async_op,
        **options,
    )


@overload
def gather(
    tensor: Tensor, dst: int, *, async_op: Literal[False] = ..., **options: Unpack[CallOptions]
) -> list[Tensor] | None: ...
@overload
def gather(
    tensor: Tensor, dst: int, *, async_op: Literal[True], **options: Unpack[CallOptions]
) -> Work[list[Tensor] | None]: ...
def gather(
    tensor: Tensor, dst: int, *, async_op: bool = False, **options: Unpack[CallOptions]
) -> list[Tensor] | Work[list[Tensor] | None] | None:
    """The tensors of all ranks, by rank, on rank `dst`; None on other ranks."""
    world = resolve_group(options.get("group"))
    check_member(dst, "dst", world)
    source = tensor.contiguous()
    is_root = dist.get_rank() == dst
    gathered = [torch.empty_like(source) for _ in range(world.size())] if is_root else None
    return run(
        "gather",
        num_bytes(tensor) * (world.size() if is_root else 1),
        lambda group, is_async: dist.gather(source, gathered, dst, group=group, async_op=is_async),
        lambda: gathered,
        same=(tensor.dtype, tensor.shape, dst),
        async_op=async_op,
        **options,
    )


@overload
def scatter(
    tensor: Tensor,
    src: int,
    parts: Sequence[Tensor] | None = ...,
    *,
    async_op: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> Tensor: ...
@overload
def scatter(
    tensor: Tensor,
    src: int,
    parts: Sequence[Tensor] | None = ...,
    *,
    async_op: Literal[True],
    **options: Unpack[CallOptions],
) -> Work[Tensor]: ...
def scatter(
    tensor: Tensor,
    src: int,
    parts: Sequence[Tensor] | None = None,
    *,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Tensor | Work[Tensor]:
    """Fill `tensor` with this rank's entry of the `parts` that rank `src` passes; the others pass none."""
    world = resolve_group(options.get("group"))
    check_member(src, "src", world)
    is_root = dist.get_rank() == src
    if is_root != (parts is not None) or (parts is not None and len(parts) != world.size()):
        raise InvalidArgument(
            "scatter takes one part for each rank, on the source rank only",
            hint=f"pass {world.size()} parts on rank {src} and none elsewhere",
            src=src,
            rank=dist.get_rank(),
            num_parts=None if parts is None else len(parts),
        )
    sources = None if parts is None else [part.contiguous() for part in parts]
    return run(
        "scatter",
        num_bytes(tensor),
        lambda group, is_async: dist.scatter(tensor, sources, src, group=group, async_op=is_async),
        lambda: tensor,
        same=(tensor.dtype, tensor.shape, src),
        async_op=async_op,
        **options,
    )


@overload
def all_to_all(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor] | None = ...,
    *,
    async_op: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> list[Tensor]: ...
@overload
def all_to_all(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor] | None = ...,
    *,
    async_op: Literal[True],
    **options: Unpack[CallOptions],
) -> Work[list[Tensor]]: ...
def all_to_all(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor] | None = None,
    *,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> list[Tensor] | Work[list[Tensor]]:
    """Send `tensors[i]` to rank i of the group and return the tensors received, by rank. Pairs may differ in shape.

    All tensors on all ranks have one dtype. `outputs` gives the tensors to fill, as in torch: `outputs[i]` has the
    shape of what rank i sends here. Without it the shapes travel first, in a call of their own that waits even if
    `async_op`, and tensors have at most 8 dims; either all ranks give `outputs` or none.
    """
    world = resolve_group(options.get("group"))
    check_one_per_rank(tensors, world.size(), "all_to_all")
    if outputs is None:
        shapes = _exchange_shapes(tensors, **options)
    else:
        check_one_per_rank(outputs, world.size(), "all_to_all")
        if (outputs[0].dtype, outputs[0].device) != (tensors[0].dtype, tensors[0].device):
            raise InvalidArgument(
                "all_to_all needs outputs of the tensors' dtype, on their device",
                hint="make them with torch.empty_like, or leave outputs out",
                tensors=f"{tensors[0].dtype} on {tensors[0].device}",
                outputs=f"{outputs[0].dtype} on {outputs[0].device}",
            )
        shapes = [output.shape for output in outputs]
    # gloo exchanges lists of equal sizes only; as rows of one tensor with splits every backend takes them.
    source = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    sent = [tensor.numel() for tensor in tensors]
    taken = [shape.numel() for shape in shapes]
    received = source.new_empty(sum(taken))

    def finish() -> list[Tensor]:
        parts = [part.view(shape) for part, shape in zip(torch.split(received, taken), shapes, strict=True)]
        if outputs is None:
            return parts
        for output, part in zip(outputs, parts, strict=True):
            output.detach().copy_(part)
        return list(outputs)

    return run(
        "all_to_all",
        num_bytes(source),
        lambda group, is_async: dist.all_to_all_single(received, source, taken, sent, group=group, async_op=is_async),
        finish,
        same=(source.dtype,),
        async_op=async_op,
        **options,
    )


_MAX_DIMS = 8


def _exchange_shapes(tensors: Sequence[Tensor], **options: Unpack[CallOptions]) -> list[torch.Size]:
    """The shape of the tensor that each rank is about to send here."""
    deepest = max(tensor.dim() for tensor in tensors)
    if deepest > _MAX_DIMS:
        raise InvalidArgument(
            f"all_to_all exchanges shapes of at most {_MAX_DIMS} dims", hint="pass outputs=", num_dims=deepest
        )
    rows = [[tensor.dim(), *tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())] for tensor in tensors]
    received = all_to_all_single(torch.tensor(rows, device=tensors[0].device), **options)
    return [torch.Size(row[1 : 1 + row[0]]) for row in received.tolist()]


@overload
def all_to_all_single(
    tensor: Tensor,
    input_splits: Sequence[int] | None = ...,
    output_splits: Sequence[int] | None = ...,
    *,
    async_op: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> Tensor: ...
@overload
def all_to_all_single(
    tensor: Tensor,
    input_splits: Sequence[int] | None = ...,
    output_splits: Sequence[int] | None = ...,
    *,
    async_op: Literal[True],
    **options: Unpack[CallOptions],
) -> Work[Tensor]: ...
def all_to_all_single(
    tensor: Tensor,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    *,
    async_op: bool = False,
    **options: Unpack[CallOptions],
) -> Tensor | Work[Tensor]:
    """Send rows of `tensor` to every rank and return the rows received, in order of rank.

    Rows are split evenly, or by `input_splits` (rows to each rank) and `output_splits` (rows from each rank).
    """
    world = resolve_group(options.get("group"))
    if (input_splits is None) != (output_splits is None):
        raise InvalidArgument("give both input_splits and output_splits, or neither", hint="even splits need neither")
    if input_splits is None or output_splits is None:
        check_even_rows(tensor, world.size(), "all_to_all_single")
        num_rows = tensor.shape[0]
    else:
        for name, splits in (("input_splits", input_splits), ("output_splits", output_splits)):
            if len(splits) != world.size() or any(rows < 0 for rows in splits):
                raise InvalidArgument(
                    f"{name} must give a number of rows for each of the {world.size()} ranks", got=list(splits)
                )
        if sum(input_splits) != tensor.shape[0]:
            raise TensorShapeMismatch(
                f"input_splits add up to {sum(input_splits)} rows, but the tensor has {tensor.shape[0]}",
                input_splits=list(input_splits),
                shape=tensor.shape,
            )
        num_rows = sum(output_splits)
    source = tensor.contiguous()
    received = source.new_empty((num_rows, *source.shape[1:]))
    sizes = (
        None if output_splits is None else list(output_splits),
        None if input_splits is None else list(input_splits),
    )
    return run(
        "all_to_all_single",
        num_bytes(tensor),
        lambda group, is_async: dist.all_to_all_single(received, source, *sizes, group=group, async_op=is_async),
        lambda: received,
        same=(tensor.dtype, tensor.shape[1:]),
        async_op=async_op,
        **options,
    )


def barrier(*, group: dist.ProcessGroup | None = None, timeout_s: float | None = None) -> None:
    """Return when every rank of the group has called it; OperationTimeout names the missing ranks."""
    run(
        "barrier",
        0,
        lambda group, is_async: dist.barrier(group=group, async_op=is_async),
        lambda: None,
        same=(),
        async_op=False,
        group=group,
        timeout_s=timeout_s,
    )


# torch 2.13 renames it and warns about the old name; 2.11 has only the old one. Drop with support for torch < 2.13.
c10d_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
