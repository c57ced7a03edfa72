"""Collectives on any tensor in terms of a wire: staging, complex numbers, sparse gradients, unusual reductions.

Each function is one rank's part of one collective and runs in the thread that executes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torsh_distributed.comm.backends.staging import Staged
from torsh_distributed.comm.backends.wire import Call, Wire
from torsh_distributed.comm.folding import fold_all
from torsh_distributed.comm.reduce_op import ReduceOp

Factor = float | Tensor | None


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _folds_as_real(wire: Wire, op: ReduceOp, dtype: torch.dtype) -> bool:
    """Whether the wire can do the reduction; sums and means of complex numbers are those of their parts."""
    if dtype.is_complex:
        return op in (ReduceOp.SUM, ReduceOp.MEAN) and wire.supports(op, dtype.to_real())
    return wire.supports(op, dtype)


def _gather_and_fold(wire: Wire, tensor: Tensor, op: ReduceOp, call: Call) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(wire.num_ranks)]
    wire.all_gather(parts, tensor, call)
    return fold_all(parts, op)


def all_reduce(wire: Wire, tensor: Tensor, op: ReduceOp, factor: Factor, call: Call) -> None:
    """Fold `tensor` over all ranks in place, each rank's multiplied by its own `factor` first if there is one."""
    staged = Staged([tensor], is_filled=True)
    [buffer] = staged.tensors
    with torch.inference_mode():
        if factor is not None:
            buffer.mul_(factor)
        if _folds_as_real(wire, op, buffer.dtype):
            wire.all_reduce(_real(buffer), op, call)
        else:
            buffer.copy_(_gather_and_fold(wire, buffer, op, call))
    staged.give_back()


def all_reduce_sparse(wire: Wire, tensor: Tensor, call: Call) -> None:
    """Sum a sparse tensor over all ranks in place: every rank gathers all rows and adds them up."""
    mine = tensor.detach().coalesce()
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(wire.num_ranks)]
    wire.all_gather(counts, torch.tensor([mine._nnz()]), call)
    indices = [torch.empty(int(count), tensor.sparse_dim(), dtype=torch.int64) for count in counts]
    values = [mine.values().new_empty(int(count), *mine.values().shape[1:]) for count in counts]
    # Rows first: the indices of a rank are then one block, whatever their number.
    wire.all_gather(indices, mine.indices().t().contiguous(), call)
    wire.all_gather(values, mine.values().contiguous(), call)
    total = torch.sparse_coo_tensor(torch.cat(indices).t(), torch.cat(values), tensor.shape, check_invariants=False)
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def reduce(wire: Wire, tensor: Tensor, op: ReduceOp, factor: Factor, root: int, call: Call) -> None:
    """Fold `tensor` over all ranks into the root's."""
    is_root = wire.rank == root
    staged = Staged([tensor], is_filled=True)
    [buffer] = staged.tensors
    with torch.inference_mode():
        if factor is not None:
            # Only the root's tensor may change.
            buffer = buffer.mul_(factor) if is_root else buffer * factor
        if _folds_as_real(wire, op, buffer.dtype):
            wire.reduce(_real(buffer), op, root, call)
        else:
            folded = _gather_and_fold(wire, buffer, op, call)
            if is_root:
                buffer.copy_(folded)
    if is_root:
        staged.give_back()


def broadcast(wire: Wire, tensor: Tensor, root: int, call: Call) -> None:
    """Make every rank's tensor equal to the root's."""
    staged = Staged([tensor], is_filled=wire.rank == root)
    wire.broadcast(staged.tensors[0], root, call)
    if wire.rank != root:
        staged.give_back()


def all_gather(wire: Wire, outputs: Sequence[Tensor], source: Tensor, call: Call) -> None:
    """Fill outputs[r] with rank r's source."""
    staged = Staged(outputs, is_filled=False)
    wire.all_gather(staged.tensors, Staged([source], is_filled=True).tensors[0], call)
    staged.give_back()


def all_gather_single(wire: Wire, output: Tensor, source: Tensor, call: Call) -> None:
    """Fill `output` with the sources of all ranks, one after the other."""
    staged = Staged([output], is_filled=False)
    parts = _equal_parts(staged.tensors[0], wire.num_ranks)
    wire.all_gather(parts, Staged([source], is_filled=True).tensors[0], call)
    staged.give_back()


def gather(wire: Wire, outputs: Sequence[Tensor] | None, source: Tensor, root: int, call: Call) -> None:
    """Fill the root's outputs[r] with rank r's source."""
    staged = Staged(outputs or [], is_filled=False)
    wire.gather(staged.tensors if wire.rank == root else None, Staged([source], is_filled=True).tensors[0], root, call)
    staged.give_back()


def scatter(wire: Wire, output: Tensor, sources: Sequence[Tensor] | None, root: int, call: Call) -> None:
    """Fill `output` with the root's source for this rank."""
    staged = Staged([output], is_filled=False)
    sent = Staged(sources, is_filled=True).tensors if sources is not None else None
    wire.scatter(staged.tensors[0], sent, root, call)
    staged.give_back()


def reduce_scatter(
    wire: Wire, output: Tensor, sources: Sequence[Tensor], op: ReduceOp, factor: Factor, call: Call
) -> None:
    """Fill `output` with the fold of everybody's source for this rank; sources are not changed."""
    staged = Staged([output], is_filled=False)
    with torch.inference_mode():
        sent = Staged(sources, is_filled=True).tensors
        if factor is not None:
            sent = [tensor * factor for tensor in sent]
        if _folds_as_real(wire, op, output.dtype):
            wire.reduce_scatter(_real(staged.tensors[0]), [_real(tensor) for tensor in sent], op, call)
        else:
            parts = [torch.empty_like(staged.tensors[0]) for _ in sent]
            wire.all_to_all(parts, sent, call)
            staged.tensors[0].copy_(fold_all(parts, op))
    staged.give_back()


def reduce_scatter_single(wire: Wire, output: Tensor, source: Tensor, op: ReduceOp, factor: Factor, call: Call) -> None:
    """Fill `output` with the fold of everybody's part number `rank` of `source`."""
    parts = _equal_parts(Staged([source], is_filled=True).tensors[0], wire.num_ranks)
    reduce_scatter(wire, output, parts, op, factor, call)


def all_to_all(wire: Wire, outputs: Sequence[Tensor], sources: Sequence[Tensor], call: Call) -> None:
    """Fill outputs[r] with rank r's source for this rank."""
    staged = Staged(outputs, is_filled=False)
    wire.all_to_all(staged.tensors, Staged(sources, is_filled=True).tensors, call)
    staged.give_back()


def all_to_all_single(
    wire: Wire, output: Tensor, source: Tensor, output_rows: Sequence[int], source_rows: Sequence[int], call: Call
) -> None:
    """All-to-all of one tensor cut along its first dimension: `source_rows[r]` rows for rank r, even if empty."""
    staged = Staged([output], is_filled=False)
    contiguous = Staged([source], is_filled=True).tensors[0]
    outputs = _cut(staged.tensors[0], output_rows, wire.num_ranks)
    wire.all_to_all(outputs, _cut(contiguous, source_rows, wire.num_ranks), call)
    staged.give_back()


def _equal_parts(tensor: Tensor, num_parts: int) -> list[Tensor]:
    flat = tensor.detach().view(-1)
    numel = flat.numel() // num_parts
    return list(torch.split(flat, numel)) if numel else [flat] * num_parts


def _cut(tensor: Tensor, rows: Sequence[int], num_parts: int) -> list[Tensor]:
    """A contiguous tensor as consecutive flat parts; equal ones if `rows` is empty."""
    if not rows:
        return _equal_parts(tensor, num_parts)
    row_numel = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
    return list(torch.split(tensor.detach().view(-1), [count * row_numel for count in rows]))
