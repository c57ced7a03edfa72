"""The snapshots in this rank's memory: its own, and those that it keeps for others."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from torsh_distributed.checkpoint.replicas.snapshot_memory import SnapshotMemory
from torsh_distributed.checkpoint.saving.file_image import private_memory


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
