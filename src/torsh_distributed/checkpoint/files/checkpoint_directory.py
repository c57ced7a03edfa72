"""A directory of checkpoints: which steps it has, who may write to it, and how one appears in it at once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import re
import shutil
import socket
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torsh_distributed.checkpoint.files.manifest import MARKER, is_checkpoint
from torsh_distributed.errors import CheckpointError

_STEP = re.compile(r"step-([0-9]{8,18})")
_OURS = re.compile(r"step-\d{8,}|\.step-\d{8,}\..*|\.lock|\.save-now")
LOCK, REQUEST = ".lock", ".save-now"


class CheckpointDirectory:
    """Checkpoints by step, under one path. Reading needs nothing; to write, hold its `DirectoryLock`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def steps(self) -> list[int]:
        """Steps that have a directory, newest first, complete or not; empty if there is no directory."""
        try:
            names = [path.name for path in self.path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((step for step in map(step_called, names) if step is not None), reverse=True)

    def step_path(self, step: int) -> Path:
        """Where a step's checkpoint is, or would be."""
        return self.path / f"step-{step:08d}"

    def complete_steps(self) -> list[int]:
        """Steps whose checkpoint has its marker, newest first; their files are not read."""
        return [step for step in self.steps() if is_checkpoint(self.step_path(step))]

    def prepare(self) -> None:
        """Create the directory, or make sure that it is one for checkpoints; nothing else in it is touched."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            names = [path.name for path in self.path.iterdir()]
        except FileExistsError as error:
            raise CheckpointError(
                f"checkpoints cannot go to {self.path}: it is a file",
                hint="name a directory that is empty or does not exist yet",
            ) from error
        except OSError as error:
            raise cannot_write(self.path, error) from error
        foreign = sorted(name for name in names if not _OURS.fullmatch(name))
        if foreign and LOCK not in names:
            raise CheckpointError(
                f"{self.path} holds other files, such as {foreign[0]}: they are not touched",
                hint="name a directory that is empty or does not exist yet",
                num_files=len(foreign),
            )

    def begin(self, step: int, job: str) -> Path:
        """The new, empty directory to write a step into, invisible to readers; every rank may call this."""
        path = self.path / f".step-{step:08d}.{job}"
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from error
        return path

    def publish(self, written: Path, step: int) -> Path:
        """Give a complete directory the step's name, at once; what had the name before is removed."""
        target, aside = self.step_path(step), None
        sync_directory(written)
        if target.is_symlink():
            raise CheckpointError(
                f"{target} is a symbolic link: it is not replaced", hint="remove it, or save to another directory"
            )
        if target.exists():
            aside = self.path / f".step-{step:08d}.old"
            target.rename(aside)
        written.rename(target)
        sync_directory(self.path)
        if aside is not None:
            shutil.rmtree(aside)
        return target

    def remove(self, step: int) -> None:
        """Remove a step; it stops being a checkpoint before any of its files goes."""
        path = self.step_path(step)
        aside = self.path / f".step-{step:08d}.removed"
        path.rename(aside)
        with contextlib.suppress(FileNotFoundError):
            (aside / MARKER).unlink()
        shutil.rmtree(aside)

    def clean(self) -> list[str]:
        """Remove what interrupted saves left, with the lock held; a checkpoint that was being replaced comes back."""
        removed = []
        for name in sorted(path.name for path in self.path.iterdir()):
            if not (name.startswith(".step-") and _OURS.fullmatch(name)):
                continue
            path, step = self.path / name, int(name.removeprefix(".step-").partition(".")[0])
            if name.endswith(".old") and is_checkpoint(path) and not self.step_path(step).exists():
                path.rename(self.step_path(step))
                continue
            shutil.rmtree(path)
            removed.append(name)
        return removed


def step_called(name: str) -> int | None:
    """The step whose directory has this name; None for any other name."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


class DirectoryLock:
    """The right to write to a directory of checkpoints, for one job. The kernel frees it when the process ends."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        directory.prepare()
        path = directory.path / LOCK
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise cannot_write(path, error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(self._file)
            os.close(self._file)
            raise CheckpointError(
                f"another job writes to {directory.path}: {holder}",
                hint="give each job its own checkpoint.dir, or end the other one",
            ) from error
        except OSError as error:
            os.close(self._file)
            raise cannot_write(path, error) from error
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
        self._release = weakref.finalize(self, os.close, self._file)
        # A forked child shares the lock: a loader's worker that outlives this process would keep it.
        os.register_at_fork(after_in_child=functools.partial(_close_in_child, weakref.ref(self)))

    def release(self) -> None:
        """Let others write."""
        self._release()


def _close_in_child(held: weakref.ref[DirectoryLock]) -> None:
    """Close a forked process's copy of the lock's file; its parent holds the lock as before."""
    lock = held()
    if lock is not None:
        lock.release()


def is_written_to(directory: CheckpointDirectory) -> bool:
    """Whether a job holds the directory's lock."""
    try:
        file = os.open(directory.path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def sync_directory(path: Path) -> None:
    """Wait until the disk has the names in a directory."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _holder(file: int) -> str:
    try:
        value = json.loads(os.pread(file, 4096, 0))
        return f"process {int(value['pid'])} on {value['host']}"
    except (ValueError, KeyError, TypeError):
        return "its process is not known"


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """The error for a path that the system refuses to write, with what to do about it."""
    hints = {
        errno.ENOSPC: "free some space, or lower checkpoint.keep",
        errno.EDQUOT: "the user's quota is used up: free some space, or lower checkpoint.keep",
        errno.EROFS: "the file system is read-only: set checkpoint.dir to another one",
        errno.EACCES: "this user may not write there: set checkpoint.dir to another directory",
        errno.ENOTDIR: "a part of the path is a file: set checkpoint.dir to a directory",
        errno.EFBIG: "the largest allowed file is too small (ulimit -f)",
    }
    return CheckpointError(
        f"{path} cannot be written: {(error.strerror or str(error)).lower()}",
        hint=hints.get(error.errno or 0),
        errno=error.errno,
    )


class StepLoss(NamedTuple):
    """A complete checkpoint: its step and loss."""

    step: int
    loss: float | None


def steps_to_remove(
    found: Sequence[StepLoss],
    *,
    keep: int,
    keep_best: int = 0,
    keep_every: int | None = None,
    saved: int | None = None,
) -> list[int]:
    """Steps of `found` to remove, oldest first: all but the last `keep`, the `keep_best` of lowest loss, and multiples
    of `keep_every`.

    The newest always stays, and so does the one that was just `saved`: if training went back because the newest ones
    are damaged, it is older than those, and may be the only good one.
    """
    newest = sorted(found, key=lambda one: one.step, reverse=True)
    kept = {one.step for one in newest[: max(1, keep)]} | (set() if saved is None else {saved})
    measured = [one for one in newest if one.loss is not None and math.isfinite(one.loss)]
    kept |= {one.step for one in sorted(measured, key=lambda one: one.loss or 0.0)[:keep_best]}
    if keep_every is not None:
        kept |= {one.step for one in newest if one.step % keep_every == 0}
    return sorted(one.step for one in newest if one.step not in kept)
