"""What we write around a tensor is what torch.load reads."""

from __future__ import annotations

import io

import pytest
import torch

from torsh_distributed.checkpoint.files.tensor_archive import ALIGNMENT, archive_for


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_torch_loads_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel() * dtype.itemsize
    data = (torch.arange(count) % (2 if dtype == torch.bool else 100)).to(torch.uint8)
    expected = data.view(dtype).view(shape)
    archive = archive_for(dtype, shape)
    assert len(archive.head) % ALIGNMENT == 0
    file = archive.head + data.numpy().tobytes() + archive.tail
    assert len(file) == archive.num_bytes
    found = torch.load(io.BytesIO(file), weights_only=True)
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, expected.shape, True)
    assert found.view(-1).view(torch.uint8).tolist() == data.tolist()
