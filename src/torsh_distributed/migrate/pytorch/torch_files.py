"""What plain torch wrote, as nested values whose tensors are read when they are asked for; nothing in it is run.

A file of `torch.save` is read with torch's `weights_only`. A directory of `torch.distributed.checkpoint` has an index,
which is a pickle too: it is read with a list of the index's own record classes, and any other name in it is an error.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from enum import EnumType
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.errors import CheckpointError
from torsh_distributed.migrate.foreign_state import PiecedTensor, load_safely
from torsh_distributed.unreadable_data import reason_of

INDEX = ".metadata"
"""The index of a directory of torch.distributed.checkpoint."""

_RECORDS = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch": frozenset({"Size", "device"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "Path"}),
    "collections": frozenset({"OrderedDict"}),
}
"""What an index names: records, and how torch spells sizes and layouts."""


def read_torch_file(path: Path, *, inert: Sequence[str] = ()) -> Any:
    """The value that torch.save wrote, with tensors that are read later."""
    return _with_pieces(load_safely(path, inert=inert))


def _with_pieces(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.dim():
            return value
        return PiecedTensor(tuple(value.shape), value.dtype, value.detach)
    if isinstance(value, Mapping):
        return {key: _with_pieces(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_pieces(part) for part in value)
    return value


def read_torch_directory(path: Path, *, inert: Sequence[str] = ()) -> Any:
    """The value that torch.distributed.checkpoint saved, with tensors that are put together later."""
    metadata = _read_index(path)
    places = metadata.storage_data
    by_name: dict[str, list[tuple[Any, Any]]] = {}
    for index, where in places.items():
        by_name.setdefault(index.fqn, []).append((index, where))
    content: dict[Any, Any] = {}
    for name, kind in metadata.state_dict_metadata.items():
        held = by_name.get(name, [])
        if hasattr(kind, "size"):
            shape = tuple(kind.size)
            read = partial(_put_chunks_together, path, name, shape, kind.properties.dtype, held)
            value: Any = PiecedTensor(shape, kind.properties.dtype, read) if shape else read()
        else:
            value = _load_part(path, *held[0]) if held else None
        _put(content, (metadata.planner_data or {}).get(name, (name,)), value)
    return content


class _UnknownRecord(Exception):
    """An index names what is not on the list."""


class _IndexReader(pickle.Unpickler):
    """Builds the records of an index and nothing else."""

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "pathlib._local":  # as Python 3.13 writes it; others know "pathlib" alone
            module_name = "pathlib"
        if global_name in _RECORDS.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype | torch.layout):
            return getattr(torch, global_name)
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member
        raise _UnknownRecord(f"{module_name}.{global_name}")


def _member(record: Any, name: str) -> Any:
    """A member of an enumeration on the list; Python 3.11.2 spells it `getattr(class, name)` in a pickle."""
    if isinstance(record, EnumType) and name in record.__members__:
        return record[name]
    raise _UnknownRecord(f"getattr({record!r}, {name!r})")


def _read_index(path: Path) -> Any:
    try:
        with (path / INDEX).open("rb") as file:
            found = _IndexReader(file).load()
    except _UnknownRecord as error:
        raise CheckpointError(
            f"{path.name}/{INDEX} names what an index does not hold, and is not read: {error}",
            hint="save the checkpoint again with torch.distributed.checkpoint",
            path=str(path),
        ) from error
    except Exception as error:  # a forged pickle may fail in any line of the records it builds
        raise CheckpointError(
            f"{path.name}/{INDEX} is damaged, or no index of torch.distributed.checkpoint: {reason_of(error)}",
            hint="copy the directory again",
            path=str(path),
        ) from error
    if not isinstance(getattr(found, "state_dict_metadata", None), dict) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{path.name}/{INDEX} is not an index of torch.distributed.checkpoint", path=str(path))
    return found


def _put(content: dict[Any, Any], keys: Sequence[Any], value: Any) -> None:
    """Set a value deep inside; positions in lists are keys of dicts here."""
    for key in keys[:-1]:
        content = content.setdefault(key, {})
    content[keys[-1]] = value


def _put_chunks_together(
    path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, held: Sequence[tuple[Any, Any]]
) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    covered = 0
    for index, where in held:
        part = _load_part(path, index, where)
        if not isinstance(part, Tensor):
            raise CheckpointError(f"{path.name}: {name} is not a tensor in {where.relative_path}")
        offsets = tuple(index.offset) if index.offset is not None else (0,) * len(shape)
        ends = [start + size for start, size in zip(offsets, part.shape, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise CheckpointError(f"{path.name}: a chunk of {name} lies outside of its shape {shape}")
        whole[tuple(slice(start, end) for start, end in zip(offsets, ends, strict=True))] = part
        covered += part.numel()
    if covered != whole.numel():
        raise CheckpointError(
            f"{path.name} holds {covered} of {whole.numel()} elements of {name}", hint="copy the directory again"
        )
    return whole


def _load_part(path: Path, index: Any, where: Any) -> Any:
    file = (path / where.relative_path).resolve()
    if not file.is_relative_to(path.resolve()):
        raise CheckpointError(f"{path.name}/{INDEX} points outside of the checkpoint: {where.relative_path}")
    if not file.is_file():
        raise CheckpointError(f"{path.name} lacks {where.relative_path}", hint="copy the directory again")
    if getattr(where, "transform_descriptors", None):
        raise CheckpointError(
            f"{path.name} is compressed ({', '.join(where.transform_descriptors)})", hint="save it without extensions"
        )
    try:
        with file.open("rb") as stream:
            stream.seek(where.offset)
            data = stream.read(where.length)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a forged pickle may fail in any of torch's lines
        raise CheckpointError(
            f"{index.fqn} cannot be read from {where.relative_path}: {reason_of(error)}",
            hint="copy the directory again",
            path=str(path),
        ) from error
