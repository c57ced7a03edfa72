"""Copies published checkpoints to the remote place, behind training: on a thread and over a group of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.checkpoint.files.manifest import DCP_INDEX, TENSORS
from torsh_distributed.checkpoint.saving.node_ranks import gathered
from torsh_distributed.checkpoint.saving.remote_mirror import RemoteMirror
from torsh_distributed.comm.groups.abort import abort
from torsh_distributed.comm.serial_thread import SerialThread
from torsh_distributed.errors import CheckpointError, TorshError

RemovalRule = Callable[[Mapping[int, float | None], int], Sequence[int]]
"""From the steps in the remote place, with their losses, and the one saved last, to those that are not kept."""

_MOST_WAITING = 2
"""Checkpoints that wait for their upload before the next save has to wait too: their local files cannot be removed."""


class CheckpointUploads:
    """Uploads one checkpoint after the other, each rank its own files; every rank makes the same calls.

    An upload that fails raises at the next save or wait, on every rank; the checkpoint in the directory is whole.
    """

    def __init__(self, mirror: RemoteMirror, *, rank: int, to_remove: RemovalRule) -> None:
        self._mirror = mirror
        self._rank = rank
        self._to_remove = to_remove
        self._channel: dist.ProcessGroup | None = None
        self._thread = SerialThread("checkpoint-uploads")
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Future[None]]] = []

    def open(self, channel: dist.ProcessGroup) -> None:
        """Give it the group over which its threads talk."""
        self._channel = channel

    @property
    def pending(self) -> set[int]:
        """Steps whose files must stay."""
        with self._lock:
            return {step for step, future in self._waiting if not future.done()}

    @property
    def num_finished(self) -> int:
        """Uploads that have ended, well or not, and that `settle` has not looked at."""
        with self._lock:
            return sum(future.done() for _, future in self._waiting)

    def submit(self, path: Path, names: Sequence[str]) -> None:
        """Upload this rank's files of a published checkpoint; waits while too many are waiting already."""
        with self._lock:
            running = [future for _, future in self._waiting if not future.done()]
        if len(running) >= _MOST_WAITING:
            running[0].exception()
        step = int(path.name.removeprefix("step-"))
        with self._lock:
            self._waiting.append((step, self._thread.submit(self._upload, path, step, list(names))))

    def settle(self, count: int) -> None:
        """Look at the `count` oldest uploads, waiting for them; raises what the first of them failed with."""
        with self._lock:
            done, self._waiting = self._waiting[:count], self._waiting[count:]
        errors = [future.exception() for _, future in done]
        for error in errors:
            if error is not None:
                raise error

    def wait(self) -> None:
        """Wait for all of them; raises what the first failed with."""
        with self._lock:
            count = len(self._waiting)
        self.settle(count)

    def abandon(self, reason: str) -> None:
        """Give up what is being uploaded; without its marker it is not a checkpoint there."""
        if self._channel is not None:
            abort(reason, group=self._channel)
        self._thread.stop()

    def close(self) -> None:
        """Wait for all of them, and accept no further ones."""
        try:
            self.wait()
        finally:
            self._thread.stop()

    def _upload(self, path: Path, step: int, names: list[str]) -> None:
        """On the thread of every rank."""
        started = time.monotonic()
        mirror = self._mirror
        # Now: once the last exchange is over, the first rank may remove the files.
        num_bytes = sum((path / name).stat().st_size for name in names)
        error = self._done(lambda: mirror.begin(step), by_first=True)
        error = error or self._done(lambda: mirror.upload(path, names))
        error = error or self._done(lambda: self._finish(path, step), by_first=True)
        event = events.CheckpointEvent(
            action="uploaded",
            path=f"{mirror.url}/{path.name}",
            step=step,
            num_bytes=num_bytes,
            duration_s=time.monotonic() - started,
            error=error,
        )
        events.emit(event)
        if error is not None:
            raise CheckpointError(
                f"{path.name} was saved, but not uploaded: {error}",
                hint="it stays in checkpoint.dir, and the next one is uploaded again; check checkpoint.remote",
                path=str(path),
            )

    def _finish(self, path: Path, saved: int) -> None:
        self._mirror.finish(path, [TENSORS, DCP_INDEX])
        for step in self._to_remove(self._mirror.losses(), saved):
            self._mirror.remove(step)

    def _done(self, action: Callable[[], None], *, by_first: bool = False) -> str | None:
        """Do it, on rank 0 alone or on every rank; what any of them failed with, on every rank."""
        failed: str | None = None
        try:
            if not by_first or self._rank == 0:
                action()
        except TorshError as error:
            failed = error.message
        except OSError as error:
            failed = str(error)
        answers = gathered(failed, self._channel)
        return next((one for one in answers if one is not None), None)
