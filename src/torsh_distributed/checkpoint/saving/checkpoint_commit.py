"""What the ranks have written becomes a checkpoint at once, in every directory, or is removed from all of them.

On the writers' threads, over their own group: ranks report their files to rank 0, which makes index, manifest and
marker; the keeper of each directory writes them and gives the directory its name.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torsh_distributed.checkpoint.files.block_hashes import FileRecord, record_of, write_file
from torsh_distributed.checkpoint.files.checkpoint_directory import CheckpointDirectory, cannot_write
from torsh_distributed.checkpoint.files.manifest import (
    DCP_INDEX,
    MANIFEST,
    MARKER,
    SHARED,
    TENSORS,
    CheckpointMetadata,
    Manifest,
    marker_for,
)
from torsh_distributed.checkpoint.files.tensor_index import TensorIndex
from torsh_distributed.checkpoint.saving.box_agreement import index_of
from torsh_distributed.checkpoint.saving.box_assignment import TensorClaim
from torsh_distributed.checkpoint.saving.file_image import FileImage
from torsh_distributed.checkpoint.saving.node_ranks import NodeRanks, first_ranks, gathered
from torsh_distributed.comm.collectives.objects import gather_object
from torsh_distributed.errors import CheckpointError

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


@dataclass(frozen=True)
class SaveTask:
    """A checkpoint that is copied and to be written."""

    directory: Path
    metadata: CheckpointMetadata
    image: FileImage
    claims: list[dict[str, TensorClaim]]
    values: dict[str, bytes]
    """File to contents: this rank's values that are not tensors."""
    error: str | None = None
    """Why this rank has no copy to write."""


class CheckpointCommit:
    """Commits one checkpoint after the other; every rank makes one and makes the same calls."""

    def __init__(self, directory: CheckpointDirectory, nodes: NodeRanks, *, is_compressed: bool) -> None:
        self._directory = directory
        self._nodes = nodes
        self._is_compressed = is_compressed
        self._boxes: dict[int, list[list[Any]]] = {}
        self._indexes: dict[str, bytes] = {}

    def run(self, task: SaveTask, written: dict[str, Any], channel: dist.ProcessGroup | None) -> dict[str, Any]:
        """What this rank has written, given to all: returns how it went, the same on every rank.

        `written` is an error, or the records of the rank's files, and where its boxes are in them if that is new.
        """
        everyone = [written] if channel is None else gather_object(written, 0, group=channel)
        outcome: dict[str, Any] = {"error": None, "num_bytes": 0, "sizes": {}}
        texts: dict[str, bytes] = {}
        if everyone is not None:
            outcome, texts = self._texts(task, everyone)
        if not self._nodes.has_one_directory:
            outcome, texts = first_ranks([outcome, texts], channel)
        failed = self._put(task, outcome, texts) if self._nodes.is_keeper and outcome["error"] is None else None
        if not self._nodes.has_one_directory:  # no directory gets its marker before all have their files
            failed = next((one for one in gathered(failed, channel) if one is not None), None)
        if failed is None and outcome["error"] is None and self._nodes.is_keeper:
            failed = self._publish(task, texts)
        if not self._nodes.has_one_directory:
            failed = next((one for one in gathered(failed, channel) if one is not None), None)
        outcome["error"] = outcome["error"] or failed
        outcome = first_ranks(outcome, channel)
        if outcome["error"] is not None and self._nodes.is_keeper:
            shutil.rmtree(task.directory, ignore_errors=True)
        return outcome

    def _texts(self, task: SaveTask, everyone: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Rank 0: how it went, and the indexes and the manifest, which vouches for all files."""
        for rank, one in enumerate(everyone):
            if one["boxes"] is not None:
                self._boxes[rank], self._indexes = one["boxes"], {}
        failed = [f"rank {rank}: {one['error']}" for rank, one in enumerate(everyone) if one["error"] is not None]
        if failed:
            return {"error": "; ".join(failed[:3]), "num_bytes": 0, "sizes": {}}, {}
        by_rank = [{name: FileRecord.from_json(one) for name, one in rank["files"].items()} for rank in everyone]
        files = {name: record for theirs in by_rank for name, record in theirs.items()}
        if not self._indexes:
            index = index_of(task.claims, [self._boxes[rank] for rank in range(len(everyone))])
            self._indexes = {
                TENSORS: index.to_bytes(),
                DCP_INDEX: dcp_metadata(index, is_compressed=self._is_compressed),
            }
        texts = dict(self._indexes)
        files |= {name: record_of(text) for name, text in texts.items()}
        manifest = Manifest(metadata=task.metadata, files=files, compression="zstd" if self._is_compressed else None)
        texts[MANIFEST] = manifest.to_bytes()
        if not self._nodes.has_one_directory:
            texts[SHARED] = task.values[SHARED]
        sizes = [{name: record.num_bytes for name, record in theirs.items()} for theirs in by_rank]
        return {"error": None, "num_bytes": manifest.num_bytes, "sizes": sizes}, texts

    def _put(self, task: SaveTask, outcome: dict[str, Any], texts: dict[str, bytes]) -> str | None:
        """A keeper: check that its ranks' files are there, and write what every directory has; returns what failed."""
        try:
            for rank in self._nodes.members:
                for name, num_bytes in outcome["sizes"][rank].items():
                    file = task.directory / name
                    size = file.stat().st_size if file.exists() else None
                    if size != num_bytes:
                        return (
                            f"{name} was written by rank {rank}, and rank {self._nodes.rank} "
                            + ("does not see it" if size is None else f"sees {size} of its {num_bytes} bytes")
                            + ": all ranks must see the same directory, or checkpoint.per_node must be set"
                        )
            for name, text in texts.items():
                if not (name == SHARED and self._nodes.rank == 0):  # which has written it as its own
                    write_file(task.directory / name, text)
        except OSError as error:
            return cannot_write(Path(error.filename or task.directory), error).message
        return None

    def _publish(self, task: SaveTask, texts: dict[str, bytes]) -> str | None:
        """A keeper: the marker, then the name; returns what failed."""
        try:
            write_file(task.directory / MARKER, marker_for(texts[MANIFEST]))
            self._directory.publish(task.directory, task.metadata.step)
        except OSError as error:
            return cannot_write(Path(error.filename or task.directory), error).message
        except CheckpointError as error:
            return error.message
        return None
