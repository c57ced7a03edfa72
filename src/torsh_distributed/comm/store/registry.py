"""`open_store`: from an address to a store that is ready to use."""

from __future__ import annotations

import difflib
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from torsh_distributed.comm.store.file import FileKeyspace
from torsh_distributed.comm.store.keyspace import DEFAULT_TIMEOUT_S, Keyspace
from torsh_distributed.comm.store.memory import MemoryKeyspace
from torsh_distributed.comm.store.redis import RedisKeyspace
from torsh_distributed.comm.store.store import Store
from torsh_distributed.comm.store.tcp.tcp_client import TcpKeyspace
from torsh_distributed.comm.trust.job_tls import find_tls
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan.sections.recovery import RetryConfig

_EXAMPLES = {
    "memory": "memory://",
    "file": "file:///shared/job7.store",
    "tcp": "tcp://127.0.0.1:29400",
    "unix": "unix:///run/job7/store",
    "redis": "redis://127.0.0.1:6379/0",
    "rediss": "rediss://redis.example:6380/0",
}


def open_store(
    url: str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    is_server: bool = False,
    token: str | None = None,
    retry: RetryConfig | None = None,
) -> Store:
    """Open the store at `url`; when this returns it has answered once.

    memory://             threads of this process; every call opens a new one
    file:///path          processes of a node, or of several on a shared POSIX file system
    tcp://host:port       a server, started elsewhere or here with `is_server=True` (port 0: a free one, see `.url`)
    unix:///path          a server on this node, as `torsh run` serves its workers
    redis://host:port/db  a Redis server (rediss:// with TLS); needs the [redis] extra

    `timeout_s` bounds connecting, each operation, and waiting for keys if a call gives no other limit.
    `token` is the job's shared secret for tcp:// and unix://; both sides must have the same. `retry` says how often a
    question to a server is repeated after its connection was lost.
    """
    parts = urlsplit(url)
    if (is_server and parts.scheme != "tcp") or (token is not None and parts.scheme not in ("tcp", "unix")):
        raise InvalidArgument(
            "is_server is for tcp:// stores, token for tcp:// and unix://", url=url, is_server=is_server
        )
    if not timeout_s > 0:
        raise InvalidArgument("a store's timeout is above 0 seconds", timeout_s=timeout_s)
    keyspace = _open_keyspace(url, parts, timeout_s=timeout_s, is_server=is_server, token=token, policy=retry)
    return Store(keyspace, timeout_s=timeout_s)


def _open_keyspace(
    url: str,
    parts: SplitResult,
    *,
    timeout_s: float,
    is_server: bool,
    token: str | None,
    policy: RetryConfig | None,
) -> Keyspace:
    match parts.scheme:
        case "memory":
            if parts.netloc or parts.path:
                raise InvalidArgument(
                    "a memory store has no name", hint="pass the store itself to the threads", url=url
                )
            return MemoryKeyspace()
        case "file":
            return FileKeyspace(_file_path(url, parts), timeout_s=timeout_s)
        case "tcp":
            host, port = _host_and_port(url, parts)
            if port == 0 and not is_server:
                raise InvalidArgument("port 0 is for the server; a client needs the real one", url=url)
            # A job under TLS has a secret, and all its stores between nodes are encrypted.
            tls = find_tls() if token is not None else None
            return TcpKeyspace(
                (host, port), timeout_s=timeout_s, is_server=is_server, token=token, policy=policy, tls=tls
            )
        case "unix":
            return TcpKeyspace(str(_file_path(url, parts)), timeout_s=timeout_s, token=token, policy=policy)
        case "redis" | "rediss":
            _host_and_port(url, parts, default_port=6379)
            return RedisKeyspace(url, timeout_s=timeout_s)
    raise _unknown_scheme(url, parts.scheme)


def _file_path(url: str, parts: SplitResult) -> Path:
    path = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not path.is_absolute():
        raise InvalidArgument("a file store needs an absolute path", hint=f"as in {_EXAMPLES['file']}", url=url)
    if path.is_dir():
        raise InvalidArgument("a file store is a file, and this is a directory", hint="add a file name", url=url)
    return path


def _host_and_port(url: str, parts: SplitResult, *, default_port: int | None = None) -> tuple[str, int]:
    try:
        port = default_port if parts.port is None else parts.port
    except ValueError as error:
        raise InvalidArgument("a port is a number from 0 to 65535", url=parts.hostname) from error
    if not parts.hostname or port is None:
        example = _EXAMPLES[parts.scheme]
        raise InvalidArgument("the address needs a host and a port", hint=f"as in {example}", url=url)
    return parts.hostname, port


def _unknown_scheme(url: str, scheme: str) -> InvalidArgument:
    nearest = difflib.get_close_matches(scheme, _EXAMPLES, n=1)
    known = ", ".join(f"{name}://" for name in _EXAMPLES)
    return InvalidArgument(
        f"unknown kind of store {scheme + '://' if scheme else repr(url)}; there are {known}",
        hint=f"did you mean {_EXAMPLES[nearest[0]]}?" if nearest else f"for example {_EXAMPLES['tcp']}",
        url=url,
    )
