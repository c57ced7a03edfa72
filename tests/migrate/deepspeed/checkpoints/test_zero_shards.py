"""Whole tensors out of flat buffers: what was cut comes back, whatever the sizes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torsh_distributed.errors import CheckpointError
from torsh_distributed.migrate.deepspeed.checkpoints.zero_shards import pieces_by_group, pieces_by_param, put_together

_SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=6)


def _tensors(shapes: list[tuple[int, ...]]) -> dict[str, Tensor]:
    ends = torch.tensor([0, *(math.prod(shape) for shape in shapes)]).cumsum(0).tolist()
    return {
        f"p{number}": torch.arange(ends[number], ends[number + 1]).reshape(shape) for number, shape in enumerate(shapes)
    }


@given(_SHAPES, st.integers(1, 5), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_groups_cut_into_equal_partitions(shapes: list[tuple[int, ...]], num_ranks: int, paddings: list[int]) -> None:
    """Stages 1 and 2: one vector of all parameters, padded between them and at the end."""
    tensors = _tensors(shapes)
    parts = [
        part
        for value, padding in zip(tensors.values(), paddings, strict=False)
        for part in (value.flatten(), torch.full((padding,), -1))
    ]
    flat = torch.cat(parts)
    flat = torch.cat([flat, torch.full((-flat.numel() % (2 * num_ranks),), -2)])
    partitions = list(flat.chunk(num_ranks))
    names = {name: tuple(value.shape) for name, value in tensors.items()}
    pieces = pieces_by_group(names, paddings[: len(shapes)], partitions[0].numel())
    for name, value in tensors.items():
        assert torch.equal(put_together(value.shape, pieces[name], partitions, name), value)


@given(_SHAPES, st.integers(1, 5))
def test_parameters_cut_one_by_one(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    """Stage 3: every parameter padded to a multiple of the ranks and cut."""
    tensors = _tensors(shapes)
    held: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    for value in tensors.values():
        padded = torch.cat([value.flatten(), torch.full((-value.numel() % num_ranks,), -1)])
        for rank, part in enumerate(padded.chunk(num_ranks)):
            held[rank].append(part)
    flats = [torch.cat(parts) for parts in held]
    pieces = pieces_by_param({name: tuple(value.shape) for name, value in tensors.items()}, num_ranks)
    for name, value in tensors.items():
        assert torch.equal(put_together(value.shape, pieces[name], flats, name), value)


def test_a_buffer_that_is_too_short_is_named() -> None:
    pieces = pieces_by_param({"a": (4,), "b": (4,)}, 2)
    with pytest.raises(CheckpointError, match="rank 1 ends before b"):
        put_together((4,), pieces["b"], [torch.zeros(4), torch.zeros(3)], "b")
