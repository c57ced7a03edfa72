"""The job's secret: made or read by the launcher, found by its workers, shown to nobody.

It travels in files that only their owner can read. Not in arguments, which every user of the machine reads in /proc,
and not in variables, which end up in logs, crash reports and the processes a worker starts.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from torsh_distributed.errors import ConfigurationError, InvalidArgument, IoError

SECRET_FILE_VARIABLE = "TORSH_SECRET_FILE"  # noqa: S105 - the name of a variable
STORE_VARIABLE = "TORSH_STORE"
"""The address of the launcher's store, which asks for the secret."""
TOKEN_VARIABLE = "TORSH_JOB_TOKEN"  # noqa: S105
_MAX_FILE_BYTES = 4096
_SECRET_BYTES = 32
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def new_secret() -> str:
    """A random secret as text."""
    return secrets.token_hex(_SECRET_BYTES)


def job_secret() -> bytes | None:
    """The secret of the job that this process belongs to; None if its launcher gave none.

    Read once: the launcher removes the file when the job ends, and workers may still sign then.
    """
    return _found(os.environ.get(SECRET_FILE_VARIABLE), os.environ.get(TOKEN_VARIABLE))


@functools.cache
def _found(path: str | None, token: str | None) -> bytes | None:
    if path:
        return read_secret_file(Path(path)).encode()
    return token.encode() if token else None


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that hold or name a secret: a job started by a worker has its own."""
    return {name: value for name, value in environ.items() if name not in (SECRET_FILE_VARIABLE, TOKEN_VARIABLE)}


def sign(secret: bytes, purpose: str, message: bytes) -> str:
    """A signature that only a member of the job can make, for this purpose alone."""
    return hmac.digest(secret, purpose.encode() + b"\0" + message, "sha256").hex()


def is_signed(secret: bytes, purpose: str, message: bytes, signature: object) -> bool:
    """Whether `signature` came from `sign` with the same arguments."""
    return isinstance(signature, str) and hmac.compare_digest(
        sign(secret, purpose, message).encode(), signature.encode(errors="replace")
    )


def write_secret_file(path: Path, secret: str) -> None:
    """Create the file, for this user alone; raises FileExistsError if there is one, a link included."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, secret.encode())
    finally:
        os.close(fd)


def read_or_create_secret_file(path: Path) -> str:
    """The secret in the file; a missing file is created with a random one, so nodes that share a file system share it.

    Complete from the first moment it can be seen: two nodes may create it at once, and the second reads the first's.
    """
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            _check_folder(path.parent)
            write_secret_file(draft, new_secret())
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        except OSError as error:
            raise _unreadable(path, error) from error
        finally:
            draft.unlink(missing_ok=True)
    return read_secret_file(path)


def read_secret_file(path: Path) -> str:
    """The secret in the file. Raises if the file is empty, or if another user can read or replace it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_file(path, os.fstat(fd))
            data = os.read(fd, _MAX_FILE_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        if isinstance(error, IoError):
            raise
        raise _unreadable(path, error) from error
    _check_folder(path.parent)
    try:
        secret = data.decode().strip()
    except UnicodeDecodeError:
        raise InvalidArgument("the file of the secret is not text", path=str(path)) from None
    if not secret or len(data) > _MAX_FILE_BYTES:
        raise InvalidArgument(
            "the file of the secret is empty" if not secret else f"the secret is longer than {_MAX_FILE_BYTES} bytes",
            hint="remove it, and `torsh run --token-file` creates one; or `openssl rand -hex 32 > FILE`",
            path=str(path),
        )
    return secret


def _check_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument("the secret must be in a regular file", path=str(path))
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigurationError(
            "the file of the secret belongs to another user", hint="use a file of your own", path=str(path)
        )
    if status.st_mode & (_OTHERS_MAY_WRITE | stat.S_IROTH):
        raise ConfigurationError(
            "other users can read or change the file of the secret",
            hint=f"chmod 600 {path}; for a Kubernetes secret set defaultMode: 0400",
            path=str(path),
            mode=oct(stat.S_IMODE(status.st_mode)),
        )


def _check_folder(folder: Path) -> None:
    """Refuse a directory in which another user could replace the file; a sticky one, as /tmp, is safe."""
    status = (folder if folder.parts else Path.cwd()).stat()
    if status.st_mode & _OTHERS_MAY_WRITE and not status.st_mode & stat.S_ISVTX:
        raise ConfigurationError(
            "other users can write to the directory of the secret",
            hint=f"chmod go-w {folder}, or use another directory",
            path=str(folder),
            mode=oct(stat.S_IMODE(status.st_mode)),
        )


def _unreadable(path: Path, error: OSError) -> IoError:
    return IoError(
        "the file of the secret cannot be read or created",
        hint="check the path and its permissions",
        path=str(path),
        reason=error.strerror or str(error),
    )
