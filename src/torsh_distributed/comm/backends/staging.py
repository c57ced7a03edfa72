"""Tensors as a wire wants them: dense, contiguous, in host memory; copied there and back where they are not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torsh_distributed.comm.backends.wire import Rows
from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch


def check_tensor(tensor: Tensor, backend: str, operation: str) -> None:
    """Raise InvalidArgument for a tensor that our backends cannot read in place."""
    if tensor.is_cpu and tensor.layout == torch.strided:
        return
    what = f"in layout {tensor.layout}" if tensor.layout != torch.strided else f"on {tensor.device}"
    raise InvalidArgument(
        f"{backend} moves dense tensors in host memory; this one is {what}",
        hint="move it with .cpu() or .to_dense(), or use nccl for CUDA tensors",
        operation=operation,
        device=str(tensor.device),
        layout=str(tensor.layout),
    )


def check_same_kind(tensors: Sequence[Tensor], other: Tensor, operation: str) -> None:
    """Raise TensorShapeMismatch unless all tensors of one call have the dtype and the device of `other`."""
    for tensor in tensors:
        if tensor.dtype != other.dtype or tensor.device != other.device:
            what = "dtype" if tensor.dtype != other.dtype else "device"
            raise TensorShapeMismatch(
                f"the tensors of one call must have the same {what}",
                hint=f"bring them to one {what} first",
                operation=operation,
                expected=str(getattr(other, what)),
                actual=str(getattr(tensor, what)),
            )


def check_numel(tensor: Tensor, expected: int, operation: str, role: str) -> None:
    """Raise TensorShapeMismatch unless the tensor has `expected` elements."""
    if tensor.numel() != expected:
        raise TensorShapeMismatch(
            f"the {role} has the wrong number of elements",
            hint="compare it with what the operation's docstring says about shapes",
            operation=operation,
            expected=expected,
            actual=tensor.numel(),
        )


def check_count(tensors: Sequence[Tensor], num_ranks: int, operation: str) -> None:
    """Raise InvalidArgument unless a list has one tensor per rank."""
    if len(tensors) != num_ranks:
        raise InvalidArgument(
            f"{operation} takes a list with one tensor per rank",
            hint="make the list as long as the group",
            operation=operation,
            expected=num_ranks,
            actual=len(tensors),
        )


def check_splits(tensor: Tensor, sizes: Sequence[int], num_ranks: int, operation: str, role: str) -> None:
    """Raise TensorShapeMismatch unless the first dimension divides into one part per rank.

    No sizes means equal parts.
    """
    length = tensor.shape[0] if tensor.dim() else tensor.numel()
    fits = len(sizes) == num_ranks and sum(sizes) == length if sizes else length % num_ranks == 0
    if not fits:
        raise TensorShapeMismatch(
            f"the {role}'s first dimension is not cut into one part per rank",
            hint="give one size per rank, adding up to the first dimension; or none, if it divides evenly",
            operation=operation,
            first_dimension=length,
            split_sizes=list(sizes) or None,
            num_ranks=num_ranks,
        )


def check_rows(output: Tensor, source: Tensor, rows: Rows, num_ranks: int, operation: str) -> None:
    """Raise TensorShapeMismatch unless all tensors are contiguous and every row index is inside its tensor."""
    named = [
        ("source", source, rows.sent, rows.send),
        ("output", output, rows.received, rows.receive),
    ]
    for role, tensor, index, counts in named:
        total, length = sum(counts), len(tensor)
        fits = len(counts) == num_ranks and tensor.is_contiguous() and tensor.numel() == length * rows.row_numel
        if index is None:
            fits = fits and total == length
        elif total:
            low, high = torch.aminmax(index)
            fits = fits and index.is_contiguous() and len(index) == total and int(low) >= 0 and int(high) < length
        if not fits:
            raise TensorShapeMismatch(
                f"the rows of the {role} do not match the counts and indices",
                hint="pass contiguous tensors, a count for each rank, and as many indices as the counts add up to",
                operation=operation,
                shape=tuple(tensor.shape),
                counts=list(counts),
                indices=None if index is None else len(index),
            )
    if rows.weights is not None and (len(rows.weights) != sum(rows.receive) or not rows.weights.is_contiguous()):
        raise TensorShapeMismatch(
            "there must be one weight for each received row", operation=operation, weights=len(rows.weights)
        )


class Staged:
    """Contiguous copies of a list of tensors; `give_back` copies back to those that needed one.

    A tensor that is contiguous already is used as it is.
    """

    def __init__(self, tensors: Sequence[Tensor], *, is_filled: bool) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.tensors: list[Tensor] = []
        for tensor in tensors:
            if tensor.is_contiguous() and not tensor.is_conj():
                self.tensors.append(tensor)
                continue
            if is_filled:
                staged = tensor.detach().contiguous().resolve_conj()
            else:
                staged = torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
            self.tensors.append(staged)
            self._pairs.append((tensor, staged))

    def give_back(self) -> None:
        """Copy back to the original tensors."""
        if self._pairs:
            with torch.inference_mode():
                for tensor, staged in self._pairs:
                    tensor.detach().copy_(staged)
