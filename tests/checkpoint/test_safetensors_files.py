"""A model in several safetensors files with an index, as from_pretrained reads them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.restoring import open_newest
from torsh_distributed.checkpoint.safetensors_files import INDEX, export


def test_shards_have_an_index_and_every_dtype_survives(tmp_path: Path) -> None:
    model = torch.nn.Module()
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16)):
        model.register_buffer(f"b{number}", torch.arange(24).view(2, 3, 4).to(dtype))
    model.register_buffer("scalar", torch.tensor(3.0))
    with CheckpointManager(tmp_path / "c") as manager:
        manager.save(1, {"model": model})
    seen: list[int] = []
    files = export(open_newest(tmp_path / "c"), tmp_path / "out", shard_bytes=150, progress=seen.append)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(seen)
    for name, value in model.state_dict().items():
        found = load_file(tmp_path / "out" / index["weight_map"][name])[name]
        assert found.dtype == value.dtype
        assert torch.equal(found, value)
