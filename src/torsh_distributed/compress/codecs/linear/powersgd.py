"""PowerSGD: each matrix of a gradient as the product of two thin ones, found by one step of power iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Averaged, Codec, Key
from torsh_distributed.compress.codecs.linear.base import all_reduce_bytes
from torsh_distributed.compress.exchange.checked_sum import CheckedSums
from torsh_distributed.compress.exchange.message_agreement import AgreementCache, signature_of
from torsh_distributed.compress.kernels.noise import uniform
from torsh_distributed.errors import CompressionError, InvalidArgument, TensorShapeMismatch

_LEAST_SAVING = 2
_NUDGE = 2.0**-20  # of a column's length: far below the gradient's noise, enough to escape a zero or repeated direction


class _FactoredMatrix(NamedTuple):
    """A tensor that travels as two factors: left (rows, rank), right (rank, columns)."""

    start: int
    rows: int
    columns: int


@dataclass(frozen=True)
class FactorLayout:
    """Which parts of a flat gradient are sent as factors, and which whole."""

    rank: int
    num_elements: int
    matrices: tuple[_FactoredMatrix, ...]
    whole: tuple[slice, ...]

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], rank: int) -> FactorLayout:
        """A tensor of two or more dimensions is a matrix of its first by all others."""
        matrices: list[_FactoredMatrix] = []
        whole: list[slice] = []
        start = 0
        for shape in shapes:
            numel = math.prod(shape)
            rows = shape[0] if len(shape) > 1 else 1
            columns = numel // max(1, rows)
            if (rows + columns) * rank * _LEAST_SAVING < rows * columns:
                matrices.append(_FactoredMatrix(start, rows, columns))
            else:
                whole.append(slice(start, start + numel))
            start += numel
        return cls(rank, start, tuple(matrices), tuple(whole))

    @property
    def num_left(self) -> int:
        """Elements of all left factors."""
        return sum(matrix.rows for matrix in self.matrices) * self.rank

    @property
    def num_right(self) -> int:
        """Elements of all right factors."""
        return sum(matrix.columns for matrix in self.matrices) * self.rank

    @property
    def num_whole(self) -> int:
        """Elements that are sent whole."""
        return sum(part.stop - part.start for part in self.whole)

    def lefts(self, buffer: Tensor) -> Iterator[Tensor]:
        """The left factors (rows, rank) in a buffer, as views."""
        start = 0
        for matrix in self.matrices:
            yield buffer[start : start + matrix.rows * self.rank].view(matrix.rows, self.rank)
            start += matrix.rows * self.rank

    def rights(self, buffer: Tensor) -> Iterator[Tensor]:
        """The right factors (rank, columns) in a buffer, as views."""
        start = 0
        for matrix in self.matrices:
            yield buffer[start : start + matrix.columns * self.rank].view(self.rank, matrix.columns)
            start += matrix.columns * self.rank

    def of_gradient(self, x: Tensor) -> Iterator[Tensor]:
        """The matrices (rows, columns) in a flat gradient, as views."""
        for start, rows, columns in self.matrices:
            yield x[start : start + rows * columns].view(rows, columns)


class PowerSgdCodec(Codec):
    """Send a matrix M as P (rows, rank) and PᵀM, where P has orthonormal columns that span M·Q.

    Q is the mean PᵀM of the step before, so the steps together are a power iteration towards the largest singular
    vectors. Two all-reduces for all matrices of a gradient, always in this order: M·Q with everything that is too small
    or too flat to factor, then PᵀM. The volume does not depend on the number of ranks.

    Ranks need not start with the same Q: P is computed from a sum, and is the same on all. So nothing is broadcast
    after a resume or a change of membership, and one step later their Q agree to the bit. Noise from the key restores
    directions that Q lost.

    `set_shapes` defines the matrices; without it a gradient is one tensor of one dimension and is sent whole. Payload:
    rank·(rows + columns) fp32 for each matrix where that saves half; every other element as fp32. Sums are checked for
    damage, within limits that `checked_sum` states.
    """

    name = "powersgd"
    is_deterministic = False

    def __init__(self, rank: int = 4) -> None:
        if not 1 <= rank <= 1024:
            raise InvalidArgument("the rank of the factors must be from 1 to 1024", rank=rank)
        self.rank = rank
        self._agreements = AgreementCache()
        self._layouts: dict[int, FactorLayout] = {}
        self._rights: dict[int, Tensor] = {}

    @override
    def set_shapes(self, stream: int, shapes: Sequence[Sequence[int]]) -> None:
        layout = FactorLayout.of(shapes, self.rank)
        if self._layouts.get(stream) != layout:
            self._layouts[stream] = layout
            kept = self._rights.get(stream)
            if kept is not None and kept.numel() != layout.num_right:
                del self._rights[stream]

    @override
    def encode(self, x: Tensor, key: Key) -> Tensor:
        layout = self._layout(x.numel(), key)
        first = self._first_half(x, layout, key)
        _orthonormalise(list(layout.lefts(first)))
        second = self._second_half(x, first, layout)
        self._rights[key.stream] = second
        return torch.cat([first, second]).view(torch.uint8)

    @override
    def decode(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        layout = self._layout(num_elements, key)
        expected = 4 * (layout.num_left + layout.num_whole + layout.num_right)
        if payload.dtype != torch.uint8 or payload.shape != (expected,):
            raise CompressionError(
                f"a powersgd message of this gradient has {expected} bytes",
                shape=tuple(payload.shape),
                dtype=payload.dtype,
            )
        values = payload.clone().view(torch.float32)
        cut = layout.num_left + layout.num_whole
        return _multiplied(values[:cut], values[cut:], layout)

    @override
    def payload_bytes(self, num_elements: int) -> int | None:
        """By the shapes of the streams with that many elements; None if they differ."""
        sizes = {
            4 * (layout.num_left + layout.num_whole + layout.num_right)
            for layout in self._layouts.values()
            if layout.num_elements == num_elements
        }
        if not sizes:
            return 4 * num_elements
        return sizes.pop() if len(sizes) == 1 else None

    @override
    def average(self, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
        num_ranks = group.size()
        layout = self._layout(x.numel(), key)
        signature = signature_of(self.name, layout.rank, layout.matrices)
        self._agreements.require(self.name, signature, x.numel(), group=group, device=x.device)
        sums = CheckedSums(self.name, group)
        first = self._first_half(x, layout, key)
        sums.all_reduce(first).div_(num_ranks)
        _orthonormalise(list(layout.lefts(first)))
        second = self._second_half(x, first, layout)
        sent = _multiplied(first, second, layout)
        for part in layout.whole:
            sent[part] = x[part]
        sums.all_reduce(second).div_(num_ranks)
        num_bytes = all_reduce_bytes(4 * first.numel(), num_ranks) + all_reduce_bytes(4 * second.numel(), num_ranks)
        sums.raise_together(x.device)
        self._rights[key.stream] = second
        return Averaged(_multiplied(first, second, layout), sent, num_bytes)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"rights": {str(stream): right.detach().cpu().clone() for stream, right in self._rights.items()}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rights = {int(stream): right.detach().clone() for stream, right in state["rights"].items()}

    @override
    def reset(self) -> None:
        self._rights.clear()
        self._agreements.forget()

    def _layout(self, num_elements: int, key: Key) -> FactorLayout:
        layout = self._layouts.get(key.stream) or FactorLayout.of([(num_elements,)], self.rank)
        if layout.num_elements != num_elements:
            raise TensorShapeMismatch(
                f"the shapes of stream {key.stream} have {layout.num_elements} elements, the gradient {num_elements}",
                hint="call set_shapes with the shapes of the tensors in this gradient",
            )
        return layout

    def _first_half(self, x: Tensor, layout: FactorLayout, key: Key) -> Tensor:
        """M·Q for all matrices, then everything that is sent whole."""
        rights = self._rights.get(key.stream)
        if rights is None or rights.numel() != layout.num_right:
            rights = x.new_zeros(layout.num_right)
        nudges = uniform(key.shared, 0, layout.num_right, x.device).sub_(0.5)
        buffer = x.new_empty(layout.num_left + layout.num_whole)
        directions = [
            (right / right.norm(dim=1, keepdim=True).clamp_(min=1e-37) + _NUDGE * nudge).t()
            for right, nudge in zip(layout.rights(rights.to(x.device)), layout.rights(nudges), strict=True)
        ]
        _orthonormalise(directions)
        for matrix, direction, left in zip(layout.of_gradient(x), directions, layout.lefts(buffer), strict=True):
            torch.mm(matrix, direction, out=left)
        if layout.whole:
            torch.cat([x[part] for part in layout.whole], out=buffer[layout.num_left :])
        return buffer

    def _second_half(self, x: Tensor, first: Tensor, layout: FactorLayout) -> Tensor:
        """PᵀM for all matrices."""
        buffer = x.new_empty(layout.num_right)
        for matrix, left, right in zip(layout.of_gradient(x), layout.lefts(first), layout.rights(buffer), strict=True):
            torch.mm(left.t(), matrix, out=right)
        return buffer


def _orthonormalise(factors: list[Tensor]) -> None:
    """Give each tall matrix orthonormal columns that span at least what its columns spanned, in place.

    By Householder reflections, which are always stable: columns that are zero, tiny or repeated become some orthonormal
    ones. Matrices of one shape go as a batch, because on a GPU the launches dominate.
    """
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for factor in factors:
        by_shape.setdefault(factor.shape, []).append(factor)
    for same in by_shape.values():
        for factor, result in zip(same, torch.linalg.qr(torch.stack(same)).Q, strict=True):
            factor.copy_(result)


def _multiplied(first: Tensor, second: Tensor, layout: FactorLayout) -> Tensor:
    """The gradient that two halves encode."""
    x = first.new_empty(layout.num_elements)
    factors = zip(layout.lefts(first), layout.rights(second), strict=True)
    for matrix, (left, right) in zip(layout.of_gradient(x), factors, strict=True):
        torch.mm(left, right, out=matrix)
    start = layout.num_left
    for part in layout.whole:
        numel = part.stop - part.start
        x[part] = first[start : start + numel]
        start += numel
    return x
