"""Snapshots that the next attempt of a job finds: in memory that outlives the workers.

Every rank has a directory: files with the memory of snapshots, and for each complete snapshot a record, written last
and removed before the memory is used again. A worker killed at any moment leaves records of whole snapshots only.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torsh_distributed.checkpoint.saving.file_image import private_memory
from torsh_distributed.comm.serialization import deserialize, serialize
from torsh_distributed.comm.shared_memory.memory_file import kept_memory, map_existing, map_new
from torsh_distributed.errors import TorshError

_log = logging.getLogger(__name__)


class SnapshotMemory:
    """Where one rank keeps the memory of its snapshots; several threads may call it."""

    def __init__(self, directory: Path, holders: Sequence[int]) -> None:
        self._directory = directory
        self._holders = list(holders)
        self._numbers = itertools.count()
        self._files: dict[int, str] = {}
        self._pinned: dict[int, Tensor] = {}
        directory.mkdir(parents=True, mode=0o700)

    def allocate(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        """Zeros for a snapshot; of this process alone, and therefore lost with it, where shared memory is full."""
        name = f"{next(self._numbers)}.bytes"
        memory = map_new(self._directory / name, num_bytes) if num_bytes else None
        if memory is None:
            if num_bytes:
                _log.warning(
                    "shared memory has no room for %d bytes: this copy does not outlive its process; enlarge /dev/shm, "
                    "or leave out checkpoint.replica_every_steps",
                    num_bytes,
                )
            return private_memory(num_bytes, is_pinned=is_pinned)
        if is_pinned:
            _register(memory)
            self._pinned[memory.data_ptr()] = memory
        self._files[memory.data_ptr()] = name
        return memory

    def release(self, memory: Tensor) -> None:
        """It is not used again."""
        name = self._files.pop(memory.data_ptr(), None)
        pinned = self._pinned.pop(memory.data_ptr(), None)
        if pinned is not None:
            _unregister(pinned)
        if name is not None:
            (self._directory / name).unlink(missing_ok=True)

    def record(self, rank: int, step: int, memory: Tensor, facts: bytes) -> None:
        """The snapshot is complete; its memory is not written to until it is forgotten."""
        name = self._files.get(memory.data_ptr(), "")
        if memory.numel() and not name:
            return
        record = self._record(rank, step)
        unfinished = record.with_suffix(".part")
        unfinished.write_bytes(serialize([rank, step, name, memory.numel(), self._holders, facts]))
        unfinished.rename(record)

    def forget(self, rank: int, step: int) -> None:
        """Its memory is about to be used again."""
        self._record(rank, step).unlink(missing_ok=True)

    def forget_other_worlds(self) -> None:
        """What earlier worlds of the job kept on this node is of no use any more."""
        world = self._directory.parent
        for path in world.parent.iterdir():
            if path != world:
                shutil.rmtree(path, ignore_errors=True)

    def _record(self, rank: int, step: int) -> Path:
        return self._directory / f"{rank}-{step}.record"


@dataclass(frozen=True)
class FoundSnapshot:
    """A snapshot that an earlier process has left."""

    keeper: int
    """The rank that kept it."""
    rank: int
    """The rank whose state it is."""
    step: int
    holders: tuple[int, ...]
    memory: Tensor
    facts: bytes


def directory_of(world: str, rank: int) -> Path | None:
    """Where a rank of this world keeps snapshots, in a job whose workers may be started again."""
    root = kept_memory()
    return None if root is None else root / world / f"rank-{rank}"


def find_kept(*, part: int, num_parts: int) -> dict[str, list[FoundSnapshot]]:
    """What earlier worlds of the job have left on this node; what cannot be read is left out.

    The node's workers share it out: this one is number `part` of `num_parts`.
    """
    root = kept_memory()
    keepers = [] if root is None else sorted(root.glob("*/rank-*"))
    found: dict[str, list[FoundSnapshot]] = {}
    for keeper in keepers[part::num_parts]:
        for path in sorted(keeper.glob("*.record")):
            try:
                one = _read(path)
            except (OSError, ValueError, TypeError, TorshError) as error:
                _log.warning("a copy in memory cannot be used: %s: %s", path.name, error)
            else:
                found.setdefault(keeper.parent.name, []).append(one)
    return found


def _read(path: Path) -> FoundSnapshot:
    rank, step, name, num_bytes, holders, facts = deserialize(path.read_bytes())
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a file beside its record")
    memory = map_existing(path.with_name(name), num_bytes) if num_bytes else private_memory(0, is_pinned=False)
    keeper = int(path.parent.name.partition("-")[2])
    return FoundSnapshot(keeper, rank, step, tuple(holders), memory, facts)


def _register(memory: Tensor) -> None:
    """Let the GPU copy straight into it, as into pinned memory."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # untyped in torch
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def _unregister(memory: Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # untyped in torch
    torch.cuda.check_error(runtime.cudaHostUnregister(memory.data_ptr()))


@dataclass(frozen=True)
class Snapshot:
    """A rank's state at a step."""

    rank: int
    step: int
    memory: Tensor
    """uint8: the boxes that the rank stored, as in its file of a checkpoint."""
    facts: bytes
    """What is in it, as `NeighbourReplicas.update` writes it."""

    def view(self) -> memoryview:
        """Its memory, to read."""
        return self.memory.numpy().data


class SnapshotShelf:
    """Snapshots by rank and step, also for the next attempt if they are `kept`; any thread may call anything."""

    def __init__(self, kept: SnapshotMemory | None = None) -> None:
        self._lock = threading.Lock()
        self._kept = kept
        self._snapshots: dict[tuple[int, int], Snapshot] = {}

    def allocate(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        """Zeros for a snapshot; `is_pinned`: a GPU is going to copy into them."""
        allocate = private_memory if self._kept is None else self._kept.allocate
        return allocate(num_bytes, is_pinned=is_pinned)

    def release(self, memory: Tensor) -> None:
        """Give up memory that `allocate` returned."""
        if self._kept is not None:
            self._kept.release(memory)

    def put(self, snapshot: Snapshot) -> None:
        """Add a complete snapshot."""
        with self._lock:
            self._snapshots[snapshot.rank, snapshot.step] = snapshot
            if self._kept is not None:
                self._kept.record(snapshot.rank, snapshot.step, snapshot.memory, snapshot.facts)

    def get(self, rank: int, step: int) -> Snapshot | None:
        """A snapshot, if it is here."""
        with self._lock:
            return self._snapshots.get((rank, step))

    def keep_only(self, rank: int, step: int | None) -> list[Tensor]:
        """Drop a rank's snapshots of all steps but one; returns their memory, to be used again."""
        with self._lock:
            gone = [key for key in self._snapshots if key[0] == rank and key[1] != step]
            if self._kept is not None:
                for key in gone:
                    self._kept.forget(*key)
            return [self._snapshots.pop(key).memory for key in gone]

    def inventory(self) -> list[tuple[int, int]]:
        """Rank and step of every complete snapshot."""
        with self._lock:
            return sorted(self._snapshots)

    @property
    def num_bytes(self) -> int:
        """Of all snapshots."""
        with self._lock:
            return sum(one.memory.nbytes for one in self._snapshots.values())
