"""The state after a round in one file, replaced as a whole: a run that is killed goes on with the same round."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import weakref
from pathlib import Path
from typing import Any, Self

from torsh_distributed.comm.serialization import deserialize, serialize
from torsh_distributed.errors import CheckpointError, ConfigurationError, SerializationError
from torsh_distributed.private_files import open_private

_MAGIC = b"torsh-round-1\n"
_DIGEST_BYTES = 32


class RoundFile:
    """`rounds.state` in a run's directory, or what else is kept beside it."""

    def __init__(self, directory: Path, name: str = "rounds.state") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / name

    def held(self) -> Self:
        """This file, for this process alone to write. ConfigurationError if another process holds it.

        Why: each of two would replace the rounds of the other, and neither would count the privacy that the other
        spends. The lock is a file beside this one, which is replaced; the kernel gives it back when the process ends.
        """
        lock = open_private(self._path.with_suffix(".lock"), os.O_WRONLY)
        weakref.finalize(self, os.close, lock)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return self  # a file system without locks
            raise ConfigurationError(
                "another process is at work in this directory",
                hint="end it, or choose another directory",
                path=str(self._path),
            ) from error
        return self

    def write(self, state: dict[str, Any]) -> None:
        """Replace the state. After a crash the file has the old one or the new one, never a part."""
        data = serialize(state)
        draft = self._path.with_suffix(".draft")
        with os.fdopen(open_private(draft, os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(_MAGIC + hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name, too, is on the disk when this returns
        finally:
            os.close(directory)

    def read(self) -> dict[str, Any] | None:
        """The state of the last round; None before the first."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        body = data[len(_MAGIC) + _DIGEST_BYTES :]
        if not data.startswith(_MAGIC + hashlib.sha256(body).digest()):
            raise self._damaged("its digest does not match")
        try:
            state = deserialize(body)
        except SerializationError as error:
            raise self._damaged(error.message) from error
        assert isinstance(state, dict), "the digest is that of what `write` wrote"
        return state

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"the state of the rounds cannot be read: {why}",
            hint="restore the file from a backup, or begin again in another directory",
            path=str(self._path),
        )
