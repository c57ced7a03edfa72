"""Memory that outlives the process that filled it: files in a directory in /dev/shm that the launcher owns.

`torsh run` makes the directory when it may start workers again, names it in TORSH_KEPT_MEMORY, and removes it at the
end of the job, as its guardian does if the launcher itself is killed. Workers put there what the next attempt needs.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

KEPT_MEMORY_VARIABLE = "TORSH_KEPT_MEMORY"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the mount itself


def make_kept_memory() -> Path | None:
    """A new directory, private to this user; None where there is no shared memory to write to."""
    try:
        return Path(tempfile.mkdtemp(prefix="torsh-kept-", dir=_SHARED_MEMORY))
    except OSError:
        return None


def kept_memory() -> Path | None:
    """The job's directory, for a worker that the launcher may start again."""
    path = os.environ.get(KEPT_MEMORY_VARIABLE)
    return Path(path) if path else None


def map_new(path: Path, num_bytes: int) -> Tensor | None:
    """A new file of `num_bytes` as a tensor of bytes; None if there is no room for it."""
    import torch

    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Room is taken now: a page that cannot be had later would end the process with SIGBUS.
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        path.unlink()
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        return None
    finally:
        os.close(file)
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def map_existing(path: Path, num_bytes: int) -> Tensor:
    """The file of an earlier process; OSError if it is not there or not as long as it was."""
    import torch

    if path.stat().st_size != num_bytes:
        raise OSError(errno.EIO, f"{path.name} has {path.stat().st_size} bytes instead of {num_bytes}")
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
