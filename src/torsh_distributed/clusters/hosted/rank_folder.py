"""The temporary folder of a rank, with the job's secret in it, and the removal of those whose rank was killed.

An engine kills ranks without a word: nothing in their process could remove the folder. So each holds a lock on a file
in it as long as a process of the rank lives, and who finds the lock free removes the folder: the next rank on the
machine, and the job's driver at its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "torsh-rank-"
_LOCK = "in-use"


@contextlib.contextmanager
def rank_folder() -> Iterator[Path]:
    """A folder of this user's alone, removed at the end; what killed ranks have left is removed first."""
    sweep_rank_folders()
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        fd = os.open(folder / f"{_LOCK}.new", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Under its name only once it is held: before that, the folder is left alone.
            (folder / f"{_LOCK}.new").rename(folder / _LOCK)
            yield folder
        finally:
            os.close(fd)


def sweep_rank_folders() -> None:
    """Remove the folders of ranks that are gone: this user's own, with a lock that nobody holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Another process may remove it meanwhile; what cannot be looked at is not ours to remove.
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    fd = os.open(folder / _LOCK, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(fd)
