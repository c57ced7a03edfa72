"""Tensors and plain values that outlive their process, and change together or not at all.

Tensors are mapped files of one directory. Before some of them are changed in place their old bytes go to an undo file;
the change ends when the record, which has the plain values, is replaced. A process that is killed anywhere in between
leaves an undo file for the record that is still there: the next one copies the old bytes back.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch import Tensor

from torsh_distributed.comm.serialization import DTYPES, TAGS
from torsh_distributed.comm.shared_memory.memory_file import make_kept_memory, map_existing, map_new
from torsh_distributed.errors import CheckpointError, MemoryAllocationFailed

Change = tuple[str, Tensor | None]
"""A tensor that is about to change: its name, and which of its rows (int64), or all of it."""
_ALIGNMENT = 16
"""Of what is in the undo file, so that its bytes can be viewed as numbers of any dtype."""
_RECORD, _UNDO, _UNDO_RECORD, _TENSOR = "record", "undo.bytes", "undo", "tensor-"


class KeptTensors:
    """The tensors of one directory. One thread at a time."""

    def __init__(self, directory: Path | None = None) -> None:
        """Continue with what an earlier process left there. Without a directory: in shared memory, until `close`."""
        self._is_temporary = directory is None
        self.directory = _shared_directory() if directory is None else directory
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.values: dict[str, Any] = {}
        """Plain values, as of the last `commit`."""
        self._tensors: dict[str, Tensor] = {}
        self._files: dict[str, str] = {}
        self._number = 0
        self._undo: Tensor | None = None
        self._open()
        self._on_disk = set(self._files.values())
        self._numbers = itertools.count(1 + max((int(file[len(_TENSOR) :]) for file in self._on_disk), default=0))

    def _open(self) -> None:
        try:
            record = _read(self.directory / _RECORD)
            if record is not None:
                self._number, self.values = int(record["number"]), dict(record["values"])
                for name, file, tag, shape in record["tensors"]:
                    self._tensors[name] = self._mapped(name, file, tag, shape)
                    self._files[name] = file
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"the record of kept tensors is not one that a server wrote: {type(error).__name__}: {error}",
                hint="begin with another directory, or with a saved copy",
                path=str(self.directory / _RECORD),
            ) from error
        for path in self.directory.glob(f"{_TENSOR}*"):
            if path.name not in self._files.values():  # of a change that did not end
                path.unlink()
        self._roll_back()

    def _mapped(self, name: str, file: str, tag: int, shape: list[int]) -> Tensor:
        if not re.fullmatch(rf"{_TENSOR}[0-9]+", file) or not all(size >= 0 for size in (tag, *shape)):
            raise ValueError(f"{name!r} is said to be {tag!r}{shape!r} in {file!r}")
        num_bytes = math.prod(shape) * DTYPES[tag].itemsize
        try:
            memory = map_existing(self.directory / file, max(1, num_bytes))
        except OSError as error:
            raise CheckpointError(
                f"the kept tensor {name} cannot be read: {error}", path=str(self.directory / file)
            ) from error
        return memory[:num_bytes].view(DTYPES[tag]).view(shape)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def names(self, prefix: str) -> list[str]:
        """The tensors whose names begin so."""
        return [name for name in self._tensors if name.startswith(prefix)]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def add(self, name: str, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """A new tensor of zeros, in place of one with that name; it is kept from the next `commit` on."""
        shape = tuple(shape)
        file = f"{_TENSOR}{next(self._numbers)}"
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = map_new(self.directory / file, max(1, num_bytes))
        if memory is None:
            raise MemoryAllocationFailed(
                "there is no room for a tensor that is to outlive its process",
                hint="enlarge /dev/shm, name a directory with more room, or use more servers",
                num_bytes=num_bytes,
                directory=str(self.directory),
            )
        self._on_disk.add(file)
        self._tensors[name] = memory[:num_bytes].view(dtype).view(shape)
        self._files[name] = file
        return self._tensors[name]

    def drop(self, name: str) -> None:
        """Without this tensor from the next `commit` on; who still reads it may go on."""
        del self._tensors[name], self._files[name]

    def commit(self, **values: Any) -> None:
        """Keep all that was changed, with these values in place of those of the same names."""
        self.values = {**self.values, **values}
        tensors = [
            [name, self._files[name], TAGS[tensor.dtype], list(tensor.shape)] for name, tensor in self._tensors.items()
        ]
        record = {"number": self._number + 1, "values": self.values, "tensors": tensors}
        # The moment of the change: from here on the undo belongs to an older record.
        _replace(self.directory / _RECORD, record)
        self._number += 1
        for file in self._on_disk - set(self._files.values()):
            (self.directory / file).unlink()
            self._on_disk.remove(file)

    @contextmanager
    def changing(self, changes: Iterable[Change]) -> Iterator[None]:
        """Inside, these tensors may be written to; `commit` ends the change. All is as before after an exception."""
        self._keep_old(list(changes))
        tensors, files, values, number = dict(self._tensors), dict(self._files), self.values, self._number
        try:
            yield
        except BaseException:
            if self._number == number:
                self._tensors, self._files, self.values = tensors, files, values
                self._roll_back()
            raise

    def _keep_old(self, changes: list[Change]) -> None:
        entries: list[list[Any]] = []
        place = 0
        for name, rows in changes:
            entries.append([name, place, None if rows is None else rows.numel()])
            place += self._tensors[name].nbytes if rows is None else rows.nbytes + self._row_bytes(name, rows.numel())
            place += -place % _ALIGNMENT
        memory = self._undo_memory(place)
        for (name, rows), (_, place, _) in zip(changes, entries, strict=True):
            tensor = self._tensors[name]
            if rows is None:
                memory[place : place + tensor.nbytes].copy_(_bytes(tensor))
                continue
            start = place + rows.nbytes
            memory[place:start].copy_(_bytes(rows))
            old = memory[start : start + self._row_bytes(name, rows.numel())].view(tensor.dtype)
            torch.index_select(tensor, 0, rows, out=old.view(rows.numel(), *tensor.shape[1:]))
        # All bytes are there before the record that speaks of them.
        _replace(self.directory / _UNDO_RECORD, {"number": self._number, "entries": entries})

    def _row_bytes(self, name: str, num_rows: int) -> int:
        return num_rows * math.prod(self._tensors[name].shape[1:]) * self._tensors[name].itemsize

    def _undo_memory(self, num_bytes: int) -> Tensor:
        if self._undo is None or self._undo.numel() < num_bytes:
            self._undo = None
            (self.directory / _UNDO).unlink(missing_ok=True)
            self._undo = map_new(self.directory / _UNDO, max(1, num_bytes))
            if self._undo is None:
                raise MemoryAllocationFailed(
                    "there is no room to keep the old values during a change",
                    hint="enlarge /dev/shm, or name a directory with more room",
                    num_bytes=num_bytes,
                    directory=str(self.directory),
                )
        return self._undo

    def _roll_back(self) -> None:
        """Undo a change that began after the last commit; killed in the middle, the next process does it again."""
        undo = _read(self.directory / _UNDO_RECORD)
        if undo is None or undo["number"] != self._number:
            return
        path = self.directory / _UNDO
        memory = map_existing(path, path.stat().st_size)
        for name, place, num_rows in undo["entries"]:
            tensor = self._tensors[name]
            if num_rows is None:
                _bytes(tensor).copy_(memory[place : place + tensor.nbytes])
                continue
            rows = memory[place : place + 8 * num_rows].clone().view(torch.int64)
            start = place + rows.nbytes
            old = memory[start : start + self._row_bytes(name, num_rows)].clone()
            tensor.index_copy_(0, rows, old.view(tensor.dtype).view(num_rows, *tensor.shape[1:]))
        # The next change overwrites these bytes: nobody may take them for the old ones again.
        (self.directory / _UNDO_RECORD).unlink()

    def save(self, path: Path) -> None:
        """Copy everything to a directory that another process can continue with; it is there whole or not at all."""
        fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            for file in self._files.values():
                shutil.copy(self.directory / file, fresh / file)
            shutil.copy(self.directory / _RECORD, fresh / _RECORD)
            fresh.rename(path)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise

    def close(self) -> None:
        """Remove the directory, if it was made here."""
        if self._is_temporary:
            shutil.rmtree(self.directory, ignore_errors=True)


def _shared_directory() -> Path:
    found = make_kept_memory()
    if found is None:
        raise MemoryAllocationFailed("there is no shared memory on this node", hint="name a directory to keep state in")
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
    except FileNotFoundError:
        return None
    return found


def _replace(path: Path, record: dict[str, Any]) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgpack.packb(record))
    fresh.replace(path)
