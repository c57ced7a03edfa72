"""Writes checkpoints: training waits for the copy into memory, a thread writes, hashes and publishes it.

On the caller's thread, all ranks together: agree on who writes what, copy it into the file's image. On the writer's
thread of each rank: write the rank's file, then commit it with the others (`checkpoint_commit`) over a group of its
own, since training's collectives have no order with these. Uploads have a thread and a group of their own, and no save
waits for them.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.checkpoint.files.block_hashes import FileDamage, FileRecord, HashedFile, check_file, write_file
from torsh_distributed.checkpoint.files.checkpoint_directory import CheckpointDirectory, DirectoryLock, cannot_write
from torsh_distributed.checkpoint.files.manifest import (
    SHARED,
    CheckpointMetadata,
    data_file,
    own_file,
    read_manifest,
)
from torsh_distributed.checkpoint.saving.box_agreement import SIGNATURE_BYTES, BoxAgreement
from torsh_distributed.checkpoint.saving.checkpoint_commit import CheckpointCommit, SaveTask
from torsh_distributed.checkpoint.saving.checkpoint_uploads import CheckpointUploads
from torsh_distributed.checkpoint.saving.file_image import FileImage
from torsh_distributed.checkpoint.saving.node_ranks import NodeRanks, gathered
from torsh_distributed.checkpoint.saving.zstd_archives import compressor
from torsh_distributed.comm.agreement import exchange_or_fail, fail_together
from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.comm.groups.manager import group_over
from torsh_distributed.comm.serial_thread import SerialThread
from torsh_distributed.comm.serialization import serialize
from torsh_distributed.comm.trust.job_tls import background_backend
from torsh_distributed.errors import CheckpointError, TorshError
from torsh_distributed.parallel.state.held_state import HeldState

_log = logging.getLogger(__name__)

_WRITE_TIMEOUT = timedelta(hours=2)
"""How long the ranks wait for the slowest disk; a rank that dies is noticed at once."""
SAVING = "save a checkpoint"
"""What ranks that could save say another one could not do."""
_READY = struct.Struct(f"<{SIGNATURE_BYTES}s8sq")
"""What a rank tells before a save: signature of its boxes, name of the job, uploads that have ended."""
_NICENESS = 10
"""The writer's thread gives way to training."""


class CheckpointWriter:
    """Writes one checkpoint at a time to a directory; every rank of the world makes one and makes the same calls."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        *,
        nodes: NodeRanks,
        compression_level: int = 0,
        verify: bool = False,
        prune: Callable[[int], None] | None = None,
        uploads: CheckpointUploads | None = None,
    ) -> None:
        """`prune` runs on the keepers after the save of a step."""
        self._directory = directory
        self._nodes = nodes
        self._compress = compressor(compression_level)
        self._commit = CheckpointCommit(directory, nodes, is_compressed=self._compress is not None)
        self._verify = verify
        self._prune = prune
        self._uploads = uploads
        self._group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        self._rank = 0 if self._group is None else self._group.rank()
        self._channel: dist.ProcessGroup | None = None
        self._lock: DirectoryLock | None = None
        self._thread = SerialThread("checkpoint-writer")
        self._committing: Future[Path] | None = None
        self._following: Future[None] | None = None
        self._boxes = BoxAgreement(self._group)
        self._image: FileImage | None = None
        self._has_told_boxes = False
        """Whether rank 0 knows where this rank's boxes are in its image."""
        self._job = ""

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written; ranks may answer differently."""
        return any(one is not None and not one.done() for one in (self._committing, self._following))

    @property
    def has_failed(self) -> bool:
        """Whether the last save has ended with an error that nobody was told yet; ranks may answer differently."""
        ended = [one for one in (self._committing, self._following) if one is not None and one.done()]
        return any(one.exception() is not None for one in ended)

    def save(self, state: HeldState, own: dict[str, Any], metadata: CheckpointMetadata) -> float:
        """Copy the state and have it written; returns the seconds that training waited.

        Waits for the save before it, and raises what that one failed with. `own` are this rank's own values.
        """
        self.wait()
        started = time.monotonic()
        events.reached("save")
        values = self._agree(state, own)
        assert self._image is not None, "agreed above"
        error = None
        try:
            self._image.copy_in(state.tensors)
        except Exception as failure:  # on this rank alone: all ranks learn of it as of a write that failed
            if not isinstance(failure, TorshError):
                _log.exception("this rank's state cannot be copied")
            error = f"its state cannot be copied: {failure}"
        stalled_s = time.monotonic() - started
        directory = self._directory.path / f".step-{metadata.step:08d}.{self._job}"
        task = SaveTask(directory, metadata, self._image, self._boxes.claims, values, error)
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
        """Wait until nothing is being written, uploads aside; raises on every rank if the last save failed."""
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

    def abandon(self, reason: str) -> None:
        """Give up what is being written, and let other jobs write; the next one removes what is left of it."""
        if self._channel is not None:
            abort(reason, group=self._channel)
        self._thread.stop()
        for future in (self._committing, self._following):
            if future is not None and (error := future.exception()) is not None:
                _log.warning("a checkpoint was given up (%s): %s", reason, error)
        self._committing = self._following = self._image = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def hold_directory(self) -> None:
        """Take the lock of this rank's directory until `close`; every rank calls this."""
        with fail_together("use the directory of checkpoints", self._group):
            self._open()

    def _open(self) -> None:
        """A keeper takes the lock, and removes what interrupted saves left."""
        if not self._nodes.is_keeper or self._lock is not None:
            return
        self._lock = DirectoryLock(self._directory)
        self._job = secrets.token_hex(4)
        try:
            for name in self._directory.clean():
                _log.warning("removed %s/%s, which an interrupted save had left", self._directory.path, name)
        except OSError as error:
            raise cannot_write(Path(error.filename or self._directory.path), error) from error

    def _agree(self, state: HeldState, own: dict[str, Any]) -> dict[str, bytes]:
        """Agree on who writes what, in one small collective while nothing changes; returns this rank's small files.

        Raises on every rank if one cannot save, or if an upload has failed: those count that rank 0 saw the end of.
        """
        values: dict[str, bytes] = {}

        def ready() -> bytes:
            self._open()
            values[own_file(self._rank)] = serialize(own)
            if self._rank == 0:
                values[SHARED] = serialize(state.values)
            finished = 0 if self._uploads is None else self._uploads.num_finished
            return _READY.pack(self._boxes.signature(state.tensors), self._job.encode(), finished)

        answers = [_READY.unpack(one) for one in exchange_or_fail(SAVING, self._group, ready, num_bytes=_READY.size)]
        _, job, finished = answers[0]
        self._job = job.decode()
        if self._group is not None and self._channel is None:
            ranks = dist.get_process_group_ranks(self._group)
            self._channel = group_over(ranks, backend=background_backend(), timeout=_WRITE_TIMEOUT)
            if self._uploads is not None:
                self._uploads.open(group_over(ranks, backend=background_backend(), timeout=_WRITE_TIMEOUT))
        if self._uploads is not None:
            self._uploads.settle(finished)
        if self._boxes.settle([signature for signature, *_ in answers]) or self._image is None:
            self._image = None  # frees its memory before the next one is made
            with fail_together(SAVING, self._group):
                image = self._boxes.image(state.tensors)
            self._image, self._has_told_boxes = image, False
        return values

    def _write_and_commit(self, task: SaveTask) -> Path:
        """On the writer's thread of every rank."""
        started = time.monotonic()
        _give_way()
        written: dict[str, Any] = {"error": task.error, "boxes": None}
        try:
            if task.error is None:
                records, boxes = self._write(task)
                written["files"] = {name: record.to_json() for name, record in records.items()}
                is_known = self._has_told_boxes and self._compress is None
                written["boxes"] = None if is_known else boxes
        except OSError as error:
            written["error"] = str(cannot_write(Path(error.filename or task.directory), error).message)
        outcome = self._commit.run(task, written, self._channel)
        self._has_told_boxes = self._has_told_boxes or written["boxes"] is not None
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

    def _write(self, task: SaveTask) -> tuple[dict[str, FileRecord], list[list[Any]]]:
        """This rank's files: returns their records, and where each box is in the data file."""
        task.directory.mkdir(exist_ok=True)  # on every rank: another node may not see it yet
        records = {name: write_file(task.directory / name, data) for name, data in task.values.items()}
        file = HashedFile(task.directory / data_file(self._rank))
        boxes: list[list[Any]] = []
        try:
            image = task.image.bytes()
            if self._compress is None:
                file.write(image)
            for name, at, sizes, start, length, data_start in task.image.boxes():
                if self._compress is not None:
                    packed = self._compress(image[start : start + length])
                    start, length = file.num_bytes, len(packed)  # noqa: PLW2901 (where it is in the file)
                    file.write(packed)
                boxes.append([name, at, sizes, start, length, data_start])
            records[data_file(self._rank)] = file.close()
        finally:
            file.abandon()
        return records, boxes

    def _follow_up(self, task: SaveTask, committing: Future[Path]) -> None:
        """After the commit, on every rank: read the files back, hand them on; only then may older checkpoints go."""
        path = committing.result()
        mine = sorted({data_file(self._rank), *task.values})
        found: list[str] = []
        try:
            if self._verify:
                found = [str(one) for name in mine for one in _read_back(path, name)]
        except (TorshError, OSError) as failure:
            found = [str(failure)]
        error = self._first_error("; ".join(found) or None)
        if error is None and self._uploads is not None:
            self._uploads.submit(path, mine)
        if error is None:
            error = self._first_error(self._cleared(path, task.metadata.step))
        if error is not None:
            raise CheckpointError(
                f"{path.name} was saved, but then: {error}",
                hint="no older checkpoint was removed; check the disk",
                path=str(path),
            )

    def _first_error(self, mine: str | None) -> str | None:
        """The first rank's error that has one, on every rank."""
        return next((one for one in gathered(mine, self._channel) if one is not None), None)

    def _cleared(self, path: Path, saved: int) -> str | None:
        """A keeper removes what is not kept; returns what failed."""
        if self._prune is None or not self._nodes.is_keeper:
            return None
        try:
            self._prune(saved)
        except TorshError as failure:
            return failure.message
        except OSError as failure:
            return cannot_write(Path(failure.filename or path), failure).message
        return None


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
