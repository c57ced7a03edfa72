"""The job's secret: made or read by the launcher, found by its workers, shown to nobody.

It travels in files that only their owner can read. Not in arguments, which every user of the machine reads in /proc,
and not in variables, which end up in logs, crash reports and the processes a worker starts.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import ipaddress
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from torsh_distributed.errors import InvalidArgument, IoError
from torsh_distributed.private_files import read_secret, require_safe_directory

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def peer_process(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket: who connected, or who listens."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def peer_uid(sock: socket.socket) -> int | None:
    """The user at the other end of a Unix socket, when it connected; None for other sockets."""
    return peer_process(sock)[1] if sock.family == socket.AF_UNIX else None


def peer_name(sock: socket.socket) -> str:
    """The other end for reports: its address, or its user on this machine."""
    uid = peer_uid(sock)
    if uid is not None:
        return f"user {uid}"
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return "an address that is gone"


def is_same_machine(sock: socket.socket) -> bool:
    """Whether both ends are on this machine by a way that no one else can write to: Unix sockets and loopback."""
    if sock.family == socket.AF_UNIX:
        return True
    try:
        ends = (sock.getsockname()[0], sock.getpeername()[0])
    except OSError:
        return False
    return all(map(is_loopback_address, ends))


def is_loopback_address(address: str) -> bool:
    """Whether a numeric address can be reached from this machine only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


SECRET_FILE_VARIABLE = "TORSH_SECRET_FILE"  # noqa: S105 - the name of a variable
STORE_VARIABLE = "TORSH_STORE"
"""The address of the launcher's store, which asks for the secret."""
TOKEN_VARIABLE = "TORSH_JOB_TOKEN"  # noqa: S105
_SECRET_BYTES = 32


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
            require_safe_directory(path.parent.resolve())
            write_secret_file(draft, new_secret())
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        except OSError as error:
            raise _unusable(path, error) from error
        finally:
            draft.unlink(missing_ok=True)
    return read_secret_file(path)


def read_secret_file(path: Path) -> str:
    """The secret in the file. Raises if the file is empty, or if another user can read or replace it."""
    try:
        secret = read_secret(path)
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, error) from error
    if not secret:
        raise InvalidArgument(
            "the file of the secret is empty",
            hint="remove it, and `torsh run --token-file` creates one; or `openssl rand -hex 32 > FILE`",
            path=str(path),
        )
    return secret


def _unusable(path: Path, error: OSError | UnicodeDecodeError) -> IoError:
    return IoError(
        "the file of the secret cannot be used",
        hint=f"only you may read it or write to its directory: chmod 600 {path}; "
        "for a Kubernetes secret set defaultMode: 0400",
        path=str(path),
        reason=str(error),
    )
