"""Experts that files hold one by one, read as the single tensor that a model keeps of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torsh_distributed.parallel.weights.reading import RowRead, read_rows, whole_tensor
from torsh_distributed.parallel.weights.safetensors_format import FileTensor


@dataclass(frozen=True)
class StackedTensor:
    """A tensor with an entry for each expert along dim 0, each entry the parts of one expert along its own dim 0."""

    experts: tuple[tuple[FileTensor, ...], ...]

    @property
    def dtype(self) -> torch.dtype:
        """That of all its parts."""
        return self.experts[0][0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """(experts, rows of all parts of one, …)."""
        first = self.experts[0]
        return (len(self.experts), sum(part.shape[0] for part in first), *first[0].shape[1:])

    @property
    def is_even(self) -> bool:
        """Whether all experts have the same parts, so they are one tensor."""
        kinds = {tuple((part.shape, part.dtype) for part in expert) for expert in self.experts}
        rest = {(part.shape[1:], part.dtype) for part in self.experts[0]}
        return len(kinds) == 1 and len(rest) == 1 and all(part.shape for part in self.experts[0])


Stored = FileTensor | StackedTensor
"""What a name of a model's state is read from."""


def row_reads(stored: Stored, start: int, stop: int, into: Tensor) -> Iterable[RowRead]:
    """The reads that fill `into` with the rows from `start` to `stop`, along dim 0 of the stored tensor."""
    if isinstance(stored, FileTensor):
        yield RowRead(stored, start, stop, into)
        return
    for place, expert in enumerate(stored.experts[start:stop]):
        begin = 0
        for part in expert:
            yield RowRead(part, 0, part.shape[0], into[place, begin : begin + part.shape[0]])
            begin += part.shape[0]


def whole_of(stored: Stored) -> Tensor:
    """The whole tensor: mapped from its file, or, of experts, put together."""
    if isinstance(stored, FileTensor):
        return whole_tensor(stored)
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    read_rows(row_reads(stored, 0, len(stored.experts), whole))
    return whole
