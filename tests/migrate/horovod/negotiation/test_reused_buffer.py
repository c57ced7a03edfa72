"""Tensors go in and out of a kept buffer, the same ones again or others of their shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torsh_distributed.migrate.horovod.negotiation.reused_buffer import ReusedBuffer

SHAPES = [(), (3,), (2, 2), (0,), (5,)]


def made(start: float, dtype: torch.dtype) -> list[Tensor]:
    return [torch.full(shape, start + index).to(dtype) for index, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_values_come_back_changed_whichever_tensors_come(dtype: torch.dtype) -> None:
    mine = made(1, dtype)
    buffer = ReusedBuffer(mine)
    for round_ in range(5):
        tensors = made(7, dtype) if round_ == 3 else mine
        if round_ == 4:
            tensors[1].set_(torch.full((3,), 50.0).to(dtype))  # the same object, other memory
        before = [tensor.clone() for tensor in tensors]
        versions = [tensor._version for tensor in tensors]
        buffer.pack(tensors)
        assert torch.equal(buffer.values, torch.cat([tensor.reshape(-1) for tensor in before]))
        buffer.values.mul_(2)
        buffer.unpack(tensors)
        for tensor, old, version in zip(tensors, before, versions, strict=True):
            assert torch.equal(tensor, old * 2)
            assert tensor._version > version
