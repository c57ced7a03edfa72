"""Files that other users can neither read nor redirect: mode 0600, not opened through a link, never another user's.

Why: events and logs may go to a directory that others write too, such as /tmp. A link put there first would make us
write to a file of its maker's choice.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

_MAX_SECRET_BYTES = 4096


def open_private(path: str | Path, flags: int) -> int:
    """A descriptor of the file at `path`, created for this user alone if it is not there; `flags` as for os.open.

    Raises OSError for a link, for a file of another user, for one with a second name, and for what is not a file.
    """
    # Non-blocking: opening a pipe that nobody reads would wait for ever. It means nothing to a regular file.
    safely = flags & ~os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, safely | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        fd = os.open(path, safely)
    try:
        _require_own_file(fd, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _require_own_file(fd: int, path: str | Path) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise _refused("it is not a regular file", path)
    if found.st_uid != os.geteuid():
        raise _refused("it belongs to another user", path)
    if found.st_nlink > 1:
        raise _refused("it has a second name (a hard link)", path)
    if found.st_mode & 0o077:
        os.fchmod(fd, 0o600)


def state_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where is remembered what outlives a process of this user: jobs, what was measured of this machine."""
    environ = os.environ if environ is None else environ
    chosen = environ.get("TORSH_STATE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "torsh"


def make_private_directories(base: Path, *names: str) -> Path:
    """The directory `base`/names…, where those named are this user's alone; returns it.

    `base` is the user's choice and is created like any directory. Raises OSError if one of the named ones is a link or
    belongs to another user.
    """
    base.mkdir(parents=True, exist_ok=True)
    path = base
    for name in names:
        path = path / name
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode):
                raise _refused("it is not a directory", path) from None
            if found.st_uid != os.geteuid():
                raise _refused("it belongs to another user", path) from None
    return path


def read_secret(path: Path) -> str:
    """The text of a file with a secret. Raises OSError if another user could read it, change it or replace it.

    Links are followed, because Kubernetes mounts secrets behind one; the checks apply to what they lead to.
    """
    # Non-blocking: opening a pipe that nobody writes would wait for ever.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        _require_secret(os.fstat(fd), path)
        for directory in path.resolve().parents:
            require_safe_directory(directory)
        data = file.read(_MAX_SECRET_BYTES + 1)
    if len(data) > _MAX_SECRET_BYTES:
        raise OSError(errno.EFBIG, f"a secret has at most {_MAX_SECRET_BYTES} bytes", str(path))
    return data.decode().strip()


def _require_secret(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _refused("it is not a regular file", path)
    if found.st_uid not in (os.geteuid(), 0):
        raise _refused("it belongs to another user", path)
    # An administrator may give a secret to a group: Kubernetes does so for processes that are not root.
    is_from_root = found.st_uid == 0 and os.geteuid() != 0
    if found.st_mode & (0o037 if is_from_root else 0o077):
        raise _refused(f"other users can read or write it (mode {stat.S_IMODE(found.st_mode):04o})", path)


def require_safe_directory(directory: Path) -> None:
    """Refuse a directory in which another user could replace the file. Where the sticky bit is set, only owners can."""
    found = directory.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise _refused("its directory belongs to another user", directory)
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise _refused(f"other users can write its directory (mode {stat.S_IMODE(found.st_mode):04o})", directory)


def _refused(why: str, path: str | Path) -> OSError:
    return OSError(errno.EPERM, why, str(path))
