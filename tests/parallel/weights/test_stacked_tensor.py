"""Experts stored one by one are read as the stack that a model keeps: all of it, or some rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.parallel.weights.checkpoints import write_file
from torsh_distributed.parallel.weights.reading import read_rows
from torsh_distributed.parallel.weights.safetensors_format import read_header
from torsh_distributed.parallel.weights.stacked_tensor import StackedTensor, row_reads, whole_of


def stored(path: Path) -> tuple[StackedTensor, Tensor]:
    """Four experts of two parts each, and the stack that they are."""
    torch.manual_seed(0)
    gates, ups = torch.randn(4, 3, 5), torch.randn(4, 3, 5)
    parts = {f"{number}.gate": gate for number, gate in enumerate(gates)}
    parts |= {f"{number}.up": up for number, up in enumerate(ups)}
    write_file(path, parts)
    files = read_header(path)
    experts = tuple((files[f"{number}.gate"], files[f"{number}.up"]) for number in range(4))
    return StackedTensor(experts), torch.cat([gates, ups], dim=1)


def test_rows_of_the_stack_are_read_from_the_files_of_their_experts(tmp_path: Path) -> None:
    stack, whole = stored(tmp_path / "experts.safetensors")
    assert (stack.shape, stack.dtype, stack.is_even) == ((4, 6, 5), torch.float32, True)
    into = torch.zeros(2, 6, 5)
    read_rows(row_reads(stack, 1, 3, into))
    torch.testing.assert_close(into, whole[1:3], rtol=0, atol=0)
    halves = torch.zeros(1, 6, 5, dtype=torch.bfloat16)
    read_rows(row_reads(stack, 3, 4, halves))
    torch.testing.assert_close(halves, whole[3:].bfloat16(), rtol=0, atol=0)


def test_the_whole_stack_is_put_together_for_pieces_that_are_no_rows(tmp_path: Path) -> None:
    stack, whole = stored(tmp_path / "experts.safetensors")
    columns = torch.zeros(4, 6, 2)
    columns.copy_(whole_of(stack)[..., 1:3])
    torch.testing.assert_close(columns, whole[..., 1:3], rtol=0, atol=0)


def test_experts_of_different_shapes_are_no_stack(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", {"0": torch.ones(2, 3), "1": torch.ones(3, 3)})
    files = read_header(tmp_path / "a.safetensors")
    assert not StackedTensor(((files["0"],), (files["1"],))).is_even
