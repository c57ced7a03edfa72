"""Writes checkpoints: training waits for the copy into memory, a thread writes, hashes and publishes it.

On the caller's thread, all ranks together: agree on who writes what, copy it into the file's image. On the writer's
thread of each rank: write the rank's file, report to rank 0 over a group of its own (training's collectives have no
order with these); rank 0 writes index, manifest and marker and publishes the directory; all ranks learn how it went.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.checkpoint.files.block_hashes import (
    FileDamage,
    FileRecord,
    HashedFile,
    check_file,
    hash_of,
)
from torsh_distributed.checkpoint.files.checkpoint_directory import CheckpointDirectory, DirectoryLock, cannot_write
from torsh_distributed.checkpoint.files.dcp_metadata import dcp_metadata
from torsh_distributed.checkpoint.files.manifest import (
    DCP_INDEX,
    MANIFEST,
    MARKER,
    SHARED,
    TENSORS,
    CheckpointMetadata,
    Manifest,
    data_file,
    marker_for,
    own_file,
    read_manifest,
)
from torsh_distributed.checkpoint.files.tensor_index import IndexedTensor, StoredBox, TensorIndex
from torsh_distributed.checkpoint.saving.box_assignment import TensorClaim, assign, claims_of, from_plain, to_plain
from torsh_distributed.checkpoint.saving.file_image import FileImage
from torsh_distributed.checkpoint.saving.remote_mirror import RemoteMirror
from torsh_distributed.checkpoint.saving.zstd_archives import compressor
from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.collectives.objects import all_gather_object, broadcast_object, gather_object
from torsh_distributed.comm.groups.manager import group_over
from torsh_distributed.comm.serial_thread import SerialThread
from torsh_distributed.comm.serialization import serialize
from torsh_distributed.errors import CheckpointError, TorshError
from torsh_distributed.parallel.state.held_state import HeldState

_log = logging.getLogger(__name__)

_WRITE_TIMEOUT = timedelta(hours=2)
"""How long the ranks wait for the slowest disk; a rank that dies is noticed at once."""
SAVING = "save a checkpoint"
"""What ranks that could save say another one could not do."""
_NICENESS = 10
"""The writer's thread gives way to training."""


@dataclass(frozen=True)
class _SaveTask:
    """A checkpoint that is copied and to be written."""

    directory: Path
    metadata: CheckpointMetadata
    image: FileImage
    claims: list[dict[str, TensorClaim]]
    values: dict[str, bytes]
    """File to contents: this rank's values that are not tensors."""


class CheckpointWriter:
    """Writes one checkpoint at a time to a directory; every rank of the world makes one and makes the same calls."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        *,
        compression_level: int = 0,
        verify: bool = False,
        prune: Callable[[], None] | None = None,
        mirror: RemoteMirror | None = None,
    ) -> None:
        self._directory = directory
        self._mirror = mirror
        self._compress = compressor(compression_level)
        self._verify = verify
        self._prune = prune
        self._group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        self._rank = 0 if self._group is None else self._group.rank()
        self._channel: dist.ProcessGroup | None = None
        self._lock: DirectoryLock | None = None
        self._thread = SerialThread("checkpoint-writer")
        self._committing: Future[Path] | None = None
        self._following: Future[None] | None = None
        self._signatures: list[str] = []
        self._claims: list[dict[str, TensorClaim]] = []
        self._image: FileImage | None = None
        self._job = ""

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written; ranks may answer differently."""
        return any(one is not None and not one.done() for one in (self._committing, self._following))

    def save(self, state: HeldState, own: dict[str, Any], metadata: CheckpointMetadata) -> float:
        """Copy the state and have it written; returns the seconds that training waited.

        Waits for the save before it, and raises what that one failed with. `own` are this rank's own values.
        """
        self.wait()
        started = time.monotonic()
        events.reached("save")
        with fail_together(SAVING, self._group):
            self._open()
            values = {own_file(self._rank): serialize(own)}
            if self._rank == 0:
                values[SHARED] = serialize(state.values)
                self._directory.begin(metadata.step, self._job)
        self._plan(state)
        assert self._image is not None, "planned above"
        self._image.copy_in(state.tensors)
        stalled_s = time.monotonic() - started
        directory = self._directory.path / f".step-{metadata.step:08d}.{self._job}"
        task = _SaveTask(directory, metadata, self._image, self._claims, values)
        self._committing = self._thread.submit(self._write_and_commit, task)
        self._following = self._thread.submit(self._follow_up, task, self._committing)
        events.emit(
            events.CheckpointEvent(
                action="copied",
                path=str(self._directory.step_path(metadata.step)),
                step=metadata.step,
                num_bytes=self._image.num_bytes,
                duration_s=stalled_s,
            )
        )
        return stalled_s

    def wait_for_commit(self) -> Path | None:
        """Wait until the last checkpoint is published; raises on every rank if it could not be."""
        committing, self._committing = self._committing, None
        if committing is None:
            return None
        try:
            return committing.result()
        except TorshError:
            self._following = None  # it ends with the same error
            raise

    def wait(self) -> None:
        """Wait until nothing is being written; raises on every rank if the last save failed."""
        self.wait_for_commit()
        following, self._following = self._following, None
        if following is not None:
            following.result()

    def take_failure(self) -> CheckpointError | None:
        """Wait until nothing is being written; returns, on every rank, what failed after the commit.

        A commit that failed was told by its event, and is not told again.
        """
        try:
            self.wait_for_commit()
        except CheckpointError:
            return None
        try:
            self.wait()
        except CheckpointError as error:
            return error
        return None

    def close(self) -> None:
        """Wait, and let other jobs write to the directory."""
        try:
            self.wait()
        finally:
            self._thread.stop()
            self._image = None
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _open(self) -> None:
        """Rank 0 takes the lock, and removes what interrupted saves left."""
        if self._rank != 0 or self._lock is not None:
            return
        self._lock = DirectoryLock(self._directory)
        self._job = secrets.token_hex(4)
        try:
            for name in self._directory.clean():
                _log.warning("removed %s/%s, which an interrupted save had left", self._directory.path, name)
        except OSError as error:
            raise cannot_write(Path(error.filename or self._directory.path), error) from error

    def _plan(self, state: HeldState) -> None:
        """Agree on who writes what; only a signature travels if nothing has changed since the last save."""
        mine = claims_of(state.tensors)
        signature = hash_of(serialize(to_plain(mine)))
        if self._group is None:
            signatures, everyone = [signature], [mine]
        else:
            if self._channel is None:
                ranks = dist.get_process_group_ranks(self._group)
                self._channel = group_over(ranks, backend="gloo", timeout=_WRITE_TIMEOUT)
            answers = all_gather_object([signature, self._job], group=self._group)
            signatures, self._job = [one for one, _ in answers], answers[0][1]
            everyone = self._claims
            if signatures != self._signatures:
                everyone = [from_plain(one) for one in all_gather_object(to_plain(mine), group=self._group)]
        if signatures != self._signatures or self._image is None:
            self._image = None  # frees its memory before the next one is made
            is_pinned = any(held.write is None and held.read().device.type == "cuda" for held in state.tensors[:1])
            self._image = FileImage(state.tensors, assign(everyone)[self._rank], is_pinned=is_pinned)
        self._signatures, self._claims = signatures, everyone

    def _write_and_commit(self, task: _SaveTask) -> Path:
        """On the writer's thread of every rank."""
        started = time.monotonic()
        _give_way()
        written: dict[str, Any] = {"error": None}
        try:
            records, boxes = self._write(task)
            written |= {"files": {name: record.to_json() for name, record in records.items()}, "boxes": boxes}
        except OSError as error:
            written["error"] = str(cannot_write(Path(error.filename or task.directory), error).message)
        everyone = [written] if self._channel is None else gather_object(written, 0, group=self._channel)
        outcome: dict[str, Any] = {"error": None, "num_bytes": 0}
        if everyone is not None:
            outcome = self._commit(task, everyone)
        if self._channel is not None:
            outcome = broadcast_object(outcome, 0, group=self._channel)
        path = self._directory.step_path(task.metadata.step)
        event = events.CheckpointEvent(
            action="saved",
            path=str(path),
            step=task.metadata.step,
            num_bytes=outcome["num_bytes"],
            duration_s=time.monotonic() - started,
            error=outcome["error"],
        )
        events.emit(event)
        if outcome["error"] is not None:
            raise CheckpointError(
                f"step {task.metadata.step} was not saved: {outcome['error']}",
                hint="older checkpoints are as they were; make room, or set checkpoint.dir to another place",
                path=str(path),
            )
        return path

    def _write(self, task: _SaveTask) -> tuple[dict[str, FileRecord], list[list[Any]]]:
        """This rank's files: returns their records, and where each box is in the data file."""
        task.directory.mkdir(exist_ok=True)  # rank 0 has made it, which another node may not see yet
        records = {name: _write_file(task.directory / name, data) for name, data in task.values.items()}
        file = HashedFile(task.directory / data_file(self._rank))
        boxes: list[list[Any]] = []
        try:
            image = task.image.bytes()
            if self._compress is None:
                file.write(image)
            for entry in task.image.entries:
                start, length = entry.start, entry.archive.num_bytes
                if self._compress is not None:
                    packed = self._compress(image[start : start + length])
                    start, length = file.num_bytes, len(packed)
                    file.write(packed)
                boxes.append([entry.name, entry.box.whole, entry.box.sizes, start, length, entry.data_start])
            records[data_file(self._rank)] = file.close()
        finally:
            file.abandon()
        return records, boxes

    def _commit(self, task: _SaveTask, everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Rank 0: what all ranks wrote becomes a checkpoint, or is removed."""
        try:
            failed = [f"rank {rank}: {one['error']}" for rank, one in enumerate(everyone) if one["error"] is not None]
            if failed:
                raise CheckpointError("; ".join(failed[:3]))
            manifest = self._manifest(task, everyone)
            text = manifest.to_bytes()
            _write_file(task.directory / MANIFEST, text)
            _write_file(task.directory / MARKER, marker_for(text))
            self._directory.publish(task.directory, task.metadata.step)
        except OSError as error:
            shutil.rmtree(task.directory, ignore_errors=True)
            return {"error": cannot_write(Path(error.filename or task.directory), error).message, "num_bytes": 0}
        except CheckpointError as error:
            shutil.rmtree(task.directory, ignore_errors=True)
            return {"error": error.message, "num_bytes": 0}
        return {"error": None, "num_bytes": manifest.num_bytes}

    def _manifest(self, task: _SaveTask, everyone: Sequence[dict[str, Any]]) -> Manifest:
        """Write the indexes; the manifest vouches for them and for what the ranks wrote."""
        files = {name: FileRecord.from_json(one) for rank in everyone for name, one in rank["files"].items()}
        for name, record in files.items():
            size = (task.directory / name).stat().st_size if (task.directory / name).exists() else None
            if size != record.num_bytes:
                raise CheckpointError(
                    f"{name} was written by its rank, and rank 0 "
                    + ("does not see it" if size is None else f"sees {size} of its {record.num_bytes} bytes")
                    + ": all ranks must see the same directory"
                )
        index = _index(task.claims, everyone)
        files[TENSORS] = _write_file(task.directory / TENSORS, index.to_bytes())
        is_compressed = self._compress is not None
        files[DCP_INDEX] = _write_file(task.directory / DCP_INDEX, dcp_metadata(index, is_compressed=is_compressed))
        return Manifest(metadata=task.metadata, files=files, compression="zstd" if is_compressed else None)

    def _follow_up(self, task: _SaveTask, committing: Future[Path]) -> None:
        """After the commit, on every rank: read the files back, upload them; only then may older checkpoints go."""
        path = committing.result()
        mine = sorted({data_file(self._rank), *task.values})
        found: list[str] = []
        try:
            if self._verify:
                found = [str(one) for name in mine for one in _read_back(path, name)]
            if self._mirror is not None and not found:
                self._mirror.upload(path, mine)
        except TorshError as failure:
            found = [failure.message]
        everyone = [found] if self._channel is None else gather_object(found, 0, group=self._channel)
        error: str | None = None
        if everyone is not None:
            error = "; ".join(one for theirs in everyone for one in theirs) or self._finish(path)
        if self._channel is not None:
            error = broadcast_object(error, 0, group=self._channel)
        if error is not None:
            raise CheckpointError(
                f"{path.name} was saved, but then: {error}",
                hint="no older checkpoint was removed; check the disk",
                path=str(path),
            )

    def _finish(self, path: Path) -> str | None:
        """Rank 0: complete the copy behind this one and remove what is not kept; returns what failed."""
        try:
            if self._mirror is not None:
                self._mirror.finish(path, [TENSORS, DCP_INDEX])
            if self._prune is not None:
                self._prune()
        except TorshError as failure:
            return failure.message
        except OSError as failure:
            return cannot_write(Path(failure.filename or path), failure).message
        return None


def _index(claims: Sequence[dict[str, TensorClaim]], everyone: Sequence[dict[str, Any]]) -> TensorIndex:
    known: dict[str, TensorClaim] = {}
    for theirs in claims:
        known = {**theirs, **known}
    boxes: dict[str, list[StoredBox]] = {}
    for rank, one in enumerate(everyone):
        for name, at, sizes, start, length, data_start in one["boxes"]:
            box = StoredBox(tuple(at), tuple(sizes), data_file(rank), start, length, data_start)
            boxes.setdefault(name, []).append(box)
    return TensorIndex(
        {name: IndexedTensor(claim.dtype, claim.shape, tuple(sorted(boxes[name]))) for name, claim in known.items()}
    )


def _write_file(path: Path, data: bytes) -> FileRecord:
    """Write a small file, and wait until the disk has it."""
    file = HashedFile(path)
    try:
        file.write(data)
        return file.close()
    finally:
        file.abandon()


def _read_back(path: Path, name: str) -> list[FileDamage]:
    """Compare a file on the disk with what was written, not with what the kernel still has in memory."""
    record = read_manifest(path).files[name]
    file = os.open(path / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
    return check_file(path, name, record)


def _give_way() -> None:
    """Lower the priority of this thread alone: Linux keeps one for each thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
