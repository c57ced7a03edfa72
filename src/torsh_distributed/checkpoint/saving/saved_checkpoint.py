"""A checkpoint on disk to load from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from typing_extensions import override

from torsh_distributed.checkpoint.files.block_hashes import FileDamage, damaged
from torsh_distributed.checkpoint.files.manifest import SHARED, TENSORS, Manifest, own_file
from torsh_distributed.checkpoint.files.mapped_file import MappedFile
from torsh_distributed.checkpoint.files.tensor_index import StoredBox, TensorIndex
from torsh_distributed.checkpoint.memory_copies import MemoryCopies
from torsh_distributed.checkpoint.saving.saved_snapshot import SavedSnapshot
from torsh_distributed.checkpoint.saving.zstd_archives import decompress
from torsh_distributed.comm.serialization import deserialize
from torsh_distributed.errors import SerializationError


class SavedCheckpoint(SavedSnapshot):
    """The state in a checkpoint whose files have been verified."""

    def __init__(self, directory: Path, manifest: Manifest, opened: dict[str, MappedFile] | None = None) -> None:
        """`opened` are files that are open already, from verifying them."""
        self.directory = directory
        self.manifest = manifest
        self._opened = {} if opened is None else opened
        self._copies = MemoryCopies()
        try:
            index = TensorIndex.from_bytes((directory / TENSORS).read_bytes())
            values = deserialize((directory / SHARED).read_bytes())
            super().__init__(str(directory), manifest.metadata, index, values, num_bytes=manifest.num_bytes)
        except (OSError, ValueError, KeyError, TypeError, SerializationError) as error:
            raise damaged(directory, [FileDamage(TENSORS, f"cannot be understood: {error}")]) from error

    @override
    def own_values(self, rank: int) -> Any:
        name = own_file(rank)
        return deserialize((self.directory / name).read_bytes()) if name in self.manifest.files else None

    @override
    def read_bytes(self, stored: StoredBox, begin: int, into: memoryview) -> None:
        try:
            if stored.file not in self._opened:
                self._opened[stored.file] = MappedFile(self.directory / stored.file)
            file = self._opened[stored.file]
            if self.manifest.compression is None:
                file.read_into(into, stored.start + stored.data_start + begin, self._copies.copy_bytes)
                return
            packed = bytes(file.view(stored.start, stored.start + stored.length))
        except OSError as error:
            raise damaged(self.directory, [FileDamage(stored.file, f"cannot be read: {error}")]) from error
        most = stored.data_start + math.prod(stored.sizes) * 16 + (1 << 16)
        plain = decompress(packed, most)
        first = stored.data_start + begin
        into[:] = memoryview(plain)[first : first + len(into)]
