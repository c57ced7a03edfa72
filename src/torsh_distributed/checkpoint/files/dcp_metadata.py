"""The index that `torch.distributed.checkpoint` reads: written so plain torch loads our tensors, never read by us."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from torsh_distributed.checkpoint.files.tensor_index import TensorIndex

_ZSTD = ("stream.zstd/1",)
"""torch's name for the compression, which its own reader undoes."""


def dcp_metadata(index: TensorIndex, *, is_compressed: bool) -> bytes:
    """The contents of `.metadata` for an index."""
    # Here, not above: it takes a second to import, and only one rank writes it.
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from torsh_distributed.checkpoint.torch_internals import _StorageInfo

    described: dict[str, Any] = {}
    places = {}
    for name, tensor in index.tensors.items():
        described[name] = TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, tensor.dtype)),
            torch.Size(tensor.shape),
            [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in tensor.boxes],
        )
        for number, box in enumerate(tensor.boxes):
            where = _StorageInfo(box.file, box.start, box.length, _ZSTD if is_compressed else None)
            places[MetadataIndex(name, box.offsets, number)] = where
    # planner_data: torch's planner asks it for the path of each name in a nested state; ours are flat.
    flat = {name: (name,) for name in described}
    return pickle.dumps(Metadata(described, planner_data=flat, storage_data=places, version="1.0.0"))
