"""A checkpoint on disk to load from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from typing_extensions import override

from torsh_distributed.checkpoint.files.block_hashes import FileDamage, damaged
from torsh_distributed.checkpoint.files.manifest import SHARED, TENSORS, Manifest, own_file, read_plain
from torsh_distributed.checkpoint.files.mapped_file import MappedFile
from torsh_distributed.checkpoint.files.tensor_index import StoredBox
from torsh_distributed.checkpoint.files.verification import read_index
from torsh_distributed.checkpoint.loading.saved_snapshot import SavedSnapshot
from torsh_distributed.checkpoint.memory_copies import MemoryCopies
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
        index = read_index(directory, manifest)
        values = self._values(SHARED)
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise damaged(directory, [FileDamage(SHARED, "it does not hold values by name")])
        try:
            super().__init__(str(directory), manifest.metadata, index, values, num_bytes=manifest.num_bytes)
        except TypeError as error:
            raise damaged(directory, [FileDamage(TENSORS, f"cannot be understood: {error}")]) from error

    @override
    def own_values(self, rank: int) -> Any:
        name = own_file(rank)
        return self._values(name) if name in self.manifest.files else None

    def _values(self, name: str) -> Any:
        try:
            return deserialize(read_plain(self.directory, name))
        except SerializationError as error:
            raise damaged(self.directory, [FileDamage(name, f"cannot be understood: {error.message}")]) from error

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
        try:
            plain = decompress(packed, most)
        except ValueError as error:
            raise damaged(self.directory, [FileDamage(stored.file, str(error))]) from error
        first = stored.data_start + begin
        if first + len(into) > len(plain):
            raise damaged(self.directory, [FileDamage(stored.file, "a tensor has fewer bytes than its shape needs")])
        into[:] = memoryview(plain)[first : first + len(into)]
