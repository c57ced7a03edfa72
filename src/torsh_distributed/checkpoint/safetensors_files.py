"""A checkpoint's model as safetensors files, as `from_pretrained` reads them, and back, one tensor at a time."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from torsh_distributed.checkpoint.files.block_hashes import Progress, read_exactly
from torsh_distributed.checkpoint.saving.saved_checkpoint import SavedCheckpoint
from torsh_distributed.errors import CheckpointError
from torsh_distributed.parallel.state.held_state import HeldState, SavedTensor
from torsh_distributed.parallel.state.held_tensors import HeldTensor, layout_of, whole_runs

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
INDEX = "model.safetensors.index.json"


def export(
    saved: SavedCheckpoint, directory: Path, *, key: str = "model", shard_bytes: int, progress: Progress | None = None
) -> list[Path]:
    """Write the tensors under `key`, without it, in files of about `shard_bytes`; returns the files."""
    tensors = {name.removeprefix(f"{key}."): kind for name, kind in saved.tensors.items() if name.startswith(f"{key}.")}
    if not tensors:
        raise CheckpointError(f"{saved.directory.name} has nothing under {key!r}", hint="name another one with --key")
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} is not empty: nothing is overwritten", hint="name a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    shards = _shards(tensors, shard_bytes)
    paths = []
    for number, names in enumerate(shards, 1):
        single = len(shards) == 1
        path = directory / ("model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        _write(saved, path, key, {name: tensors[name] for name in names}, progress)
        paths.append(path)
    if len(shards) > 1:
        places = {name: path.name for path, names in zip(paths, shards, strict=True) for name in names}
        total = sum(_num_bytes(kind) for kind in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (directory / INDEX).write_text(json.dumps(index, indent=2))
    return paths


def _write(
    saved: SavedCheckpoint, path: Path, key: str, tensors: Mapping[str, SavedTensor], progress: Progress | None
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kind in tensors.items():
        if kind.dtype not in _NAMES:
            raise CheckpointError(f"{name} is {kind.dtype}, which safetensors has no name for")
        header[name] = {
            "dtype": _NAMES[kind.dtype],
            "shape": list(kind.shape),
            "data_offsets": [end, end + _num_bytes(kind)],
        }
        end += _num_bytes(kind)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, kind in tensors.items():
            whole = torch.empty(kind.shape, dtype=kind.dtype)
            saved.fill(f"{key}.{name}", layout_of(kind.shape, whole_runs(kind.shape), kind.shape), whole)
            file.write(_bytes_of(whole))
            if progress is not None:
                progress(_num_bytes(kind))
        file.flush()
        os.fsync(file.fileno())


def model_in(path: Path) -> HeldState:
    """The tensors of a safetensors file, or of a directory of them, as a state to save; read when it is."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"there is no safetensors file in {path}", hint="name a file, or a directory of them")
    state = HeldState(values={"model": {}})
    for file in files:
        for name, kind, start in _entries(file):
            layout = layout_of(kind.shape, whole_runs(kind.shape), kind.shape)
            state.tensors.append(HeldTensor(f"model.{name}", layout, kind.dtype, partial(_read, file, kind, start)))
    return state


def _entries(path: Path) -> Iterator[tuple[str, SavedTensor, int]]:
    """Name, kind and first byte of each tensor of a file; CheckpointError unless the file is as it says."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            kind = SavedTensor(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
            start, stop = entry["data_offsets"]
            if stop - start != _num_bytes(kind) or not 0 <= start <= stop <= size - 8 - length:
                raise ValueError(f"the bytes of {name} do not fit its shape or the file")
            yield name, kind, 8 + length + start
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


def _read(path: Path, kind: SavedTensor, start: int) -> Tensor:
    whole = torch.empty(kind.shape, dtype=kind.dtype)
    with path.open("rb") as file:
        read_exactly(file.fileno(), _bytes_of(whole), start)
    return whole


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _shards(tensors: Mapping[str, SavedTensor], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, kind in tensors.items():
        if shards[-1] and held + _num_bytes(kind) > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += _num_bytes(kind)
    return shards


def _num_bytes(kind: SavedTensor) -> int:
    return torch.Size(kind.shape).numel() * kind.dtype.itemsize
