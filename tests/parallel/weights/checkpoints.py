"""Safetensors files for tests, written by the format's definition and not by the code under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from torsh_distributed.train.demos.gpt import CharGPT

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header, data = {}, b""
    for name, value in tensors.items():
        raw = bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        header[name] = {
            "dtype": _CODES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_folder(folder: Path, tensors: Mapping[str, Tensor], *, num_files: int) -> None:
    """Several files and their index, as Hugging Face writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    where = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        mine = {name: tensors[name] for name in names[number::num_files]}
        write_file(folder / file, mine)
        where.update(dict.fromkeys(mine, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def gpt(seed: int = 3) -> CharGPT:
    """Four heads and a vocabulary that two ranks cannot share evenly."""
    torch.manual_seed(seed)
    return CharGPT(29, width=16, num_layers=4, num_heads=4)


def on_meta(make: type[nn.Module] | None = None) -> nn.Module:
    with torch.device("meta"):
        return gpt() if make is None else make()
